// Texts as words: what changed between two of them, and where the words of an answer come from.

const segmenter = new Intl.Segmenter(undefined, { granularity: "word" });
const LARGEST_TABLE = 4_000_000; // cells; beyond it the part that differs is shown as replaced

// Words that say nothing about where an answer comes from.
const COMMON = new Set(
  ("a an and are as at be been but by did do does for from had has have he her his i in is it its no not of on or " +
    "she so than that the their them then there these they this to was we were what when where which who why will " +
    "with would yes you").split(" "),
);

/** The words of a text, each with the spaces and marks that follow it; joined they are the text. */
export function words(text) {
  const found = [];
  for (const { segment, isWordLike } of segmenter.segment(text)) {
    if (isWordLike) found.push({ word: segment, text: segment });
    else if (found.length) found.at(-1).text += segment;
    else found.push({ word: "", text: segment });
  }
  return found;
}

/** The way from one text to another: spans of kind "same", "added" or "dropped", with the number of their words. */
export function diff(before, after) {
  const a = words(before);
  const b = words(after);
  let start = 0;
  while (start < a.length && start < b.length && a[start].word === b[start].word) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end).word === b.at(-1 - end).word) end++;
  const middle = changes(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const same = (list) => list.map((word) => ["same", word]);
  return merged([...same(b.slice(0, start)), ...middle, ...same(b.slice(b.length - end))]);
}

/** How many words a diff adds, drops and keeps. */
export function counts(spans) {
  const total = { same: 0, added: 0, dropped: 0 };
  for (const span of spans) total[span.kind] += span.words;
  return total;
}

/** An answer in spans, those with words that say something carrying the number of the chunk that brought them. */
export function sourced(answer, memories) {
  const first = new Map();
  memories.forEach((memory, index) => {
    for (const { word } of words(memory)) {
      const key = normal(word);
      if (!first.has(key)) first.set(key, index + 1);
    }
  });
  const spans = [];
  for (const { word, text } of words(answer)) {
    const key = normal(word);
    const chunk = !key || COMMON.has(key) ? null : (first.get(key) ?? null);
    const last = spans.at(-1);
    if (last && last.chunk === chunk) last.text += text;
    else spans.push({ chunk, text });
  }
  return spans;
}

/** What a reply says to others: what follows its thinking, up to thinking that never ended. */
export function withoutThinking(reply) {
  return reply.split("</think>").at(-1).split(/^[ \t]{0,8}<think>/m)[0];
}

/** The first words of a text, for a name. */
export function firstWords(text) {
  const all = text.trim().slice(0, 200).replaceAll(/[\s/\\]+/g, " ");
  return all.length <= 48 ? all : all.slice(0, 48).replace(/ \S*$/, "");
}

/** A number of bytes as people say it. */
export function size(bytes) {
  return bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1000))} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** The answer in a reply: the content of its last closed box, else all that follows the thinking. */
export function answerOf(reply) {
  const text = withoutThinking(reply);
  for (let box = text.lastIndexOf("\\boxed{"); box >= 0; box = text.lastIndexOf("\\boxed{", box - 1)) {
    let depth = 0;
    for (let at = box + 6; at < text.length; at++) {
      if (text[at] === "\\") at++; // an escaped brace is text
      else if (text[at] === "{") depth++;
      else if (text[at] === "}" && --depth === 0) return text.slice(box + 7, at).trim();
    }
    if (box === 0) break;
  }
  return text.trim();
}

/** A text in spans, those marked whose words are among the given ones. */
export function marked(text, wanted) {
  const keys = new Set(words(wanted).map(({ word }) => normal(word)).filter((key) => key && !COMMON.has(key)));
  return words(text).map(({ word, text: whole }) => ({
    mark: keys.has(normal(word)) ? word : "",
    text: keys.has(normal(word)) ? whole.slice(word.length) : whole,
  }));
}

function changes(a, b) {
  if (a.length * b.length > LARGEST_TABLE) {
    return [...a.map((word) => ["dropped", word]), ...b.map((word) => ["added", word])];
  }
  // common[i * width + j]: the length of the longest common subsequence of a[i..] and b[j..]
  const width = b.length + 1;
  const common = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i * width + j] =
        a[i].word === b[j].word
          ? common[(i + 1) * width + j + 1] + 1
          : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const path = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i].word === b[j].word) {
      path.push(["same", b[j]]);
      i++;
      j++;
    } else if (j === b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      path.push(["dropped", a[i++]]);
    } else {
      path.push(["added", b[j++]]);
    }
  }
  return path;
}

function merged(path) {
  const spans = [];
  for (const [kind, { word, text }] of path) {
    if (spans.at(-1)?.kind !== kind) spans.push({ kind, text: "", words: 0 });
    spans.at(-1).text += text;
    spans.at(-1).words += word ? 1 : 0; // what stands before the first word has none
  }
  return spans;
}

function normal(word) {
  return word.normalize("NFKC").toLowerCase();
}
