// The few things that every view does with elements.

export function byId(id) {
  return document.getElementById(id);
}

export function listen(id, event, action) {
  byId(id).addEventListener(event, action);
}

/** Show or hide an element, given by itself or by its id. */
export function show(target, visible) {
  (typeof target === "string" ? byId(target) : target).hidden = !visible;
}

/** Make an element; texts among its children are never markup. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function clear(target) {
  target.replaceChildren();
  return target;
}
