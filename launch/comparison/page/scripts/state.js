// The data of the page, what is shown of it, and who is told when that changes.

const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs;

const AXES = ["steps", "samples", "hours", "flops"].filter((axis) =>
  runs.some((run) => run.axes[axis] !== null));

const state = {
  axis: "steps",
  shown: runs.map(() => true),
  smoothing: 0,
  logX: false,
  logY: false,
  range: null,  // [lowest, highest] x of all metric charts; null: everything
};

const listeners = [];

function onChange(listener) {
  listeners.push(listener);
}

let pending = null;

// Listeners run once per frame, with the names of everything that changed since.
function change(values) {
  Object.assign(state, values);
  if (pending === null) {
    pending = new Set();
    requestAnimationFrame(() => {
      const changed = pending;
      pending = null;
      for (const listener of listeners) listener(changed);
    });
  }
  for (const name of Object.keys(values)) pending.add(name);
}

function setShown(run, visible) {
  const shown = state.shown.slice();
  shown[run] = visible;
  change({ shown });
}

// An element. Text is only ever set as text, never as markup.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const NUM_COLOURS = 7;
const DASHES = [[], [8, 4], [2, 3]];

function colourOf(run) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--run-${run % NUM_COLOURS}`).trim();
}

function dashOf(run) {
  return DASHES[Math.floor(run / NUM_COLOURS) % DASHES.length];
}

// A short line in the colour and dash of a run.
function swatch(run) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  const attributes = { x1: 0, y1: 5, x2: 22, y2: 5, "stroke-width": 3.5, "stroke-linecap": "butt" };
  for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
  line.setAttribute("stroke", `var(--run-${run % NUM_COLOURS})`);
  line.setAttribute("stroke-dasharray", dashOf(run).join(" ") || "none");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("width", 22);
  svg.setAttribute("height", 10);
  svg.setAttribute("aria-hidden", "true");
  svg.append(line);
  return svg;
}
