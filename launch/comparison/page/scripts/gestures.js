// Wheel, touch and keyboard on a chart. Dragging with a mouse is uPlot's own.

const WHEEL_STEP = 0.8;
const KEY_STEP = 1 / 40;

// Called for every new uPlot of a chart.
function addGestures(chart) {
  const { over } = chart.plot;
  over.addEventListener("pointerenter", (event) => {
    chart.active = true;
    chart.touched = event.pointerType !== "mouse";
  });
  over.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") {
      chart.active = false;
      chart.hideTip();
    }
  });
  over.addEventListener("mousedown", () => chart.area.focus({ preventScroll: true }));
  over.addEventListener("wheel", (event) => onWheel(chart, event), { passive: false });
  addTouch(chart, over);
  if (!chart.hasKeys) {
    chart.hasKeys = true;
    chart.area.addEventListener("keydown", (event) => onKey(chart, event));
    chart.area.addEventListener("blur", () => {
      chart.active = false;
      chart.hideTip();
    });
  }
}

// The page scrolls unless the chart has the focus or a modifier is held; a pinch on a trackpad
// arrives as a wheel with Ctrl.
function onWheel(chart, event) {
  const meant = event.ctrlKey || event.metaKey || event.shiftKey;
  if (!meant && document.activeElement !== chart.area) return;
  event.preventDefault();
  const left = event.clientX - chart.plot.over.getBoundingClientRect().left;
  const turned = event.deltaY || event.deltaX;
  chart.zoomAbout(left, turned < 0 ? WHEEL_STEP : 1 / WHEEL_STEP);
}

// One finger reads values, two zoom and move; vertical swipes still scroll the page.
function addTouch(chart, over) {
  const fingers = new Map();
  const isTouch = (event) => event.pointerType === "touch" || event.pointerType === "pen";
  const place = (event) => event.clientX - over.getBoundingClientRect().left;

  over.addEventListener("pointerdown", (event) => {
    if (!isTouch(event)) return;
    fingers.set(event.pointerId, place(event));
    chart.active = true;
    if (fingers.size === 1) showAt(chart, place(event));
  });
  over.addEventListener("pointermove", (event) => {
    if (!isTouch(event) || !fingers.has(event.pointerId)) return;
    const before = [...fingers.values()];
    fingers.set(event.pointerId, place(event));
    const after = [...fingers.values()];
    if (fingers.size === 1) showAt(chart, after[0]);
    if (fingers.size === 2) pinch(chart, before, after);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    over.addEventListener(name, (event) => fingers.delete(event.pointerId));
  }
}

function pinch(chart, before, after) {
  const spread = ([a, b]) => Math.max(20, Math.abs(a - b));
  const middle = ([a, b]) => (a + b) / 2;
  chart.hideTip();
  const moved = middle(after) - middle(before);
  chart.zoomAbout(middle(after), spread(before) / spread(after), moved);
}

function showAt(chart, left) {
  const { over } = chart.plot;
  const inside = Math.max(0, Math.min(over.clientWidth, left));
  chart.plot.setCursor({ left: inside, top: over.clientHeight / 2 });
}

// Arrows read values, with Shift they move the view; + and - zoom, 0 and Escape reset.
function onKey(chart, event) {
  if (!chart.plot || event.ctrlKey || event.metaKey || event.altKey) return;
  const width = chart.plot.over.clientWidth;
  const { left } = chart.plot.cursor;
  const here = left === null || left < 0 ? width / 2 : left;
  const arrow = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  chart.active = true;
  if (arrow && event.shiftKey) chart.zoomAbout(here, 1, -arrow * width / 8);
  else if (arrow) showAt(chart, here + arrow * width * KEY_STEP);
  else if (event.key === "Home") showAt(chart, 0);
  else if (event.key === "End") showAt(chart, width);
  else if (event.key === "+" || event.key === "=") chart.zoomAbout(here, WHEEL_STEP);
  else if (event.key === "-") chart.zoomAbout(here, 1 / WHEEL_STEP);
  else if (event.key === "0" || event.key === "Escape") chart.view.setRange(null);
  else return;
  event.preventDefault();
}
