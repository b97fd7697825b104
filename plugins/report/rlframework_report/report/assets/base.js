// Shared by all sections: the data, the state of the controls, and functions that create elements. Text from runs is
// only set as text (textContent, attributes without code); no string is ever parsed as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 8;
const SHAPES = ["circle", "square", "triangle", "diamond"];
const state = { shown: data.runs.map(() => true), span: data.smooth, along: "step", robust: false, zoom: null, hover: null };
const listeners = { draw: [], hover: [], runs: [] };
const notify = (what) => listeners[what].forEach((listener) => listener());
const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The activities of all charts: one colour for each, whatever the chart and the run. */
const ACTIVITIES = [...new Set([...data.runs.flatMap((run) => run.phases?.names ?? []), ...data.runs.flatMap((run) => run.timeline?.activities ?? [])])].filter((name) => !["other", "wait"].includes(name));
const paintOf = (name) => (ACTIVITIES.includes(name) ? `p${ACTIVITIES.indexOf(name) % 8}` : "c-rest");

const colour = (index) => `c${index % COLOURS}`;

function shapePath(shape, x, y, r) {
  if (shape === "square") return `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`;
  if (shape === "triangle") return `M${x},${y - 1.2 * r}l${1.15 * r},${2 * r}h${-2.3 * r}z`;
  if (shape === "diamond") return `M${x},${y - 1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`;
  return `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`;
}

const shapeOf = (run) => SHAPES[run % SHAPES.length];

/** A run's colour and shape; the shape distinguishes runs without colour. `open` is the style of held-out values. */
function runKey(run, open = false) {
  const path = svg("path", { d: shapePath(shapeOf(run), 7, 7, 4.4), stroke: "currentColor", "stroke-width": 1.8, fill: open ? "none" : "currentColor" });
  return el("span", { class: `key ${colour(run)}`, "aria-hidden": "true" }, svg("svg", { viewBox: "0 0 14 14", width: 14, height: 14 }, path));
}

function runName(run, open = false) {
  const name = data.runs[run].name;
  return el("span", { class: `name${name.length > 24 ? " long-name" : ""}` }, runKey(run, open), el("span", {}, name));
}

/** Format a number in a few characters: 0.853, 1,234, 6.2e-5. */
function number(value, percent = false) {
  if (value === null || value === undefined) return "–";
  if (percent) return `${(100 * value).toFixed(1)}%`;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 100) return `${Number(value.toPrecision(3))} s`;
  const minutes = value / 60;
  return minutes < 100 ? `${minutes.toFixed(minutes < 10 ? 1 : 0)} min` : `${(minutes / 60).toFixed(1)} h`;
}

/** About `count` ticks within the range, at multiples of 1, 2 or 5 times a power of ten. */
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.75);
  if (whole) step = Math.max(1, step);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => (first + i) * step);
}

/** The last index with a position of at most `x` (-1 if none) in the ascending `places`. */
function indexBefore(places, x) {
  let [low, high] = [0, places.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function nearest(places, x) {
  const before = indexBefore(places, x);
  if (before < 0) return 0;
  return before + 1 < places.length && places[before + 1] - x < x - places[before] ? before + 1 : before;
}

/** A step's position on the horizontal axis: the step itself, or the seconds of training until its end. */
function placeOf(run, step) {
  if (state.along === "step") return step;
  const [steps, clock] = data.runs[run].clock;
  const before = indexBefore(steps, step);
  if (before < 0) return clock[0] ?? 0;
  if (before === steps.length - 1) return clock[before];
  const share = (step - steps[before]) / (steps[before + 1] - steps[before]);
  return clock[before] + share * (clock[before + 1] - clock[before]);
}

/** Bias-corrected exponential moving average over about `span` steps. */
function smoothed(at, values, span) {
  const decay = (span - 1) / (span + 1);
  let [total, weight] = [0, 0];
  return values.map((value, i) => {
    const keep = i ? decay ** Math.max(at[i] - at[i - 1], 0) : 0;
    total = total * keep + value;
    weight = weight * keep + 1;
    return total / weight;
  });
}
