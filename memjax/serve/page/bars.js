// The bars over the slider: for every chunk the words of the memory that stayed, that it added, and that it dropped.

import { clear } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100;

/** Draw the changes, `expected` bars wide, with the chunk `shown` marked. Returns how many words the highest bar is. */
export function drawBars(svg, changes, { expected, shown, isReading }) {
  const above = Math.max(1, ...changes.map(({ same, added }) => same + added));
  const below = Math.max(1, ...changes.map(({ dropped }) => dropped));
  const scale = (HEIGHT - 4) / (above + below);
  const line = above * scale + 2;
  svg.parentElement.style.maxWidth = `${Math.max(6, expected * 3)}rem`; // few chunks are no wide blocks
  svg.setAttribute("viewBox", `0 0 ${expected} ${HEIGHT}`);
  clear(svg);
  const draw = (index, y, height, name) => {
    if (height <= 0) return;
    const rect = document.createElementNS(SVG, "rect");
    const gap = expected > 150 ? 0.05 : 0.14;
    for (const [key, value] of Object.entries({ x: index + gap, width: 1 - 2 * gap, y, height, class: name })) {
      rect.setAttribute(key, value);
    }
    svg.append(rect);
  };
  draw(shown - 1, 0, HEIGHT, "selected");
  changes.forEach(({ same, added, dropped }, index) => {
    draw(index, line - same * scale, same * scale, "same");
    draw(index, line - (same + added) * scale, added * scale, "added");
    draw(index, line, dropped * scale, "dropped");
  });
  for (let index = changes.length; index < expected; index++) {
    draw(index, line - 3, 3, index === changes.length && isReading ? "current" : "ahead");
  }
  return above;
}
