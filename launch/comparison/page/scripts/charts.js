// One chart: a uPlot over curves of several runs, with values under the cursor and as a table.

const CHART_HEIGHT = 250;
const NUM_TABLE_ROWS = 21;
const PAPER_WIDTH = 640;
const FADED = 0.28, FADED_AMONG_MANY = 0.12;

const charts = [];

// A chart needs:
//   title, note: text; key: unique id
//   view: {axis, logX, logY, range, setRange(range)}: what is shown of x, shared by linked charts
//   curves(): [{run, x, y, raw}], in the units of the data
//   extent(): [lowest, highest] x of the linked charts, or null
//   link: name of the charts whose cursors move together, or null
class Chart {
  constructor(options) {
    Object.assign(this, options);
    this.plot = null;
    this.curveList = [];
    this.visible = false;
    this.stale = true;
    this.active = false;
    this.card = this.makeCard();
    charts.push(this);
    new ResizeObserver(() => this.resize()).observe(this.area);
    new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible && this.stale) this.draw();
    }, { rootMargin: "200px" }).observe(this.card);
  }

  makeCard() {
    const id = `chart-${charts.length}`;
    this.area = make("div", {
      class: "plot", role: "group", "aria-roledescription": "chart", "aria-labelledby": id,
    });
    this.tip = make("div", { class: "tip", role: "status", hidden: true });
    this.table = make("div", { class: "scroll" });
    this.details = make("details", { class: "values", ontoggle: () => this.fillTable() },
      make("summary", { text: "Table" }), this.table);
    this.wide = make("button", {
      class: "quiet", type: "button", "aria-pressed": "false", text: "Enlarge",
      "aria-label": `Enlarge ${this.title}`, onclick: () => this.enlarge(),
    });
    const head = make("figcaption", {},
      this.heading = make("h3", { id, text: this.title }),
      make("span", { class: "soft", text: this.note || "" }),
      this.wide);
    return make("figure", { class: "card chart", "data-chart": this.key },
      head, this.area, this.details);
  }

  enlarge() {
    const large = this.card.classList.toggle("large");
    this.wide.setAttribute("aria-pressed", String(large));
    this.wide.textContent = large ? "Shrink" : "Enlarge";
  }

  setTitle(title) {
    this.title = this.heading.textContent = title;
  }

  height() {
    return this.card.classList.contains("large") ? 2 * CHART_HEIGHT : CHART_HEIGHT;
  }

  refresh() {
    if (this.visible) this.draw();
    else this.stale = true;
  }

  unit() {
    const totals = runs.map((run) => run.totals[this.view.axis] || 0);
    return unitOf(this.view.axis, Math.max(...totals));
  }

  draw() {
    this.stale = false;
    const { scale } = this.unit();
    const inUnits = (x) => x.map((value) => value * scale);
    const { logX, logY } = this.view;
    this.curveList = this.curves().map((curve) => ({
      ...positiveOnly({ ...curve, x: inUnits(curve.x) }, logX, logY),
      raw: curve.raw && positiveOnly({ ...curve.raw, x: inUnits(curve.raw.x) }, logX, logY),
    })).filter((curve) => curve.x.length > 0);
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.hideTip();
    const faded = this.curveList.filter((curve) => curve.raw);
    this.series = [
      ...faded.map((curve) => ({ ...curve.raw, run: curve.run, faded: true })),
      ...this.curveList,
    ];
    this.area.replaceChildren();
    if (this.series.length === 0) {
      this.area.append(make("p", { class: "note", text: this.emptyText() }));
    } else {
      const data = uPlot.join(this.series.map((each) => [each.x, each.y]));
      this.plot = new uPlot(this.options(), data, this.area);
      // A tap counts as a mouse that stays.
      this.plot.over.addEventListener("mouseenter", () => { this.active = true; });
      this.plot.over.addEventListener("mouseleave", () => {
        this.active = false;
        this.hideTip();
      });
      this.area.append(this.tip);
    }
    this.card.dataset.drawn = String(this.series.length);
    this.fillTable();
  }

  emptyText() {
    if (!state.shown.some(Boolean)) return "All runs are hidden.";
    const name = AXIS_NAMES[this.view.axis];
    return `No run shown has this metric with known ${name.toLowerCase()}.`;
  }

  fullRange() {
    const extent = this.extent();
    if (extent === null) return [0, 1];
    const { scale } = this.unit();
    const [low, high] = [extent[0] * scale, extent[1] * scale];
    if (this.view.logX) return low < high ? [low, high] : [low / 2, high * 2];
    return high > 0 ? [0, high] : [0, 1];
  }

  // Range of x as drawn.
  range() {
    return this.view.range || this.fullRange();
  }

  options() {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(name).trim();
    const font = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
    const axis = {
      stroke: colour("--soft"), font, labelFont: font, gap: 4,
      grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false },
    };
    const texts = (_, splits) => splits.map((value) => value === null ? "" : formatTick(value));
    const { logX, logY } = this.view;
    return {
      width: this.area.clientWidth, height: this.height(), padding: [10, 18, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: () => this.range() },
        y: { distr: logY ? 3 : 1, range: (_, low, high) => padded(low, high, logY) },
      },
      axes: [
        {
          ...axis, label: this.unit().name, labelSize: 20, size: 28, space: 60, values: texts,
          ...logTicks(logX),
        },
        { ...axis, size: (_, values) => widthOf(values), space: 28, values: texts, ...logTicks(logY) },
      ],
      series: [{}, ...this.series.map((each) => this.seriesOptions(each))],
      cursor: {
        sync: this.link ? { key: this.link, setSeries: false } : undefined,
        drag: { x: true, y: false, setScale: false, dist: 6 },
        y: false,
        points: { size: (_, i) => this.series[i - 1].faded ? 0 : 8 },
        dataIdx: nearestIndex,
        bind: { dblclick: () => () => this.view.setRange(null) },
      },
      hooks: { setCursor: [() => this.showTip()], setSelect: [(plot) => this.zoomToSelection(plot)] },
    };
  }

  seriesOptions({ run, faded }) {
    const colour = colourOf(run);
    const faint = this.curveList.length > 3 ? FADED_AMONG_MANY : FADED;
    return {
      label: runs[run].label, spanGaps: true, dash: faded ? [] : dashOf(run),
      stroke: colour, alpha: faded ? faint : 1, width: faded ? 1 : 2,
      points: faded ? { show: false } : { size: 6, fill: colour, stroke: colour },
    };
  }

  zoomToSelection(plot) {
    const { left, width } = plot.select;
    if (width < 2) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.view.setRange(range);
  }

  applyRange() {
    if (this.plot && this.visible) this.plot.setData(this.plot.data, true);
    else this.stale = true;
    this.fillTable();
  }

  resize(width = this.area.clientWidth) {
    if (this.plot && width > 0) this.plot.setSize({ width, height: this.height() });
  }

  // A chart that was never in view is not drawn yet, and paper is narrower than a screen.
  prepareForPaper() {
    if (this.stale) this.draw();
    this.resize(PAPER_WIDTH);
  }

  // Values of all curves at x: [{run, x, y, rawY}].
  valuesAt(x) {
    const [low, high] = this.range();
    const found = [];
    for (const curve of this.curveList) {
      const place = nearest(curve.x, x);
      const slack = (high - low) / 50;
      if (x < curve.x[0] - slack || x > curve.x[curve.x.length - 1] + slack) continue;
      const raw = curve.raw && curve.raw.y[nearest(curve.raw.x, x)];
      found.push({ run: curve.run, x: curve.x[place], y: curve.y[place], rawY: raw });
    }
    return found;
  }

  showTip() {
    const { left } = this.plot.cursor;
    if (!this.active || left === null || left < 0) return this.hideTip();
    const x = this.plot.posToVal(left, "x");
    const values = this.valuesAt(x).sort((a, b) => b.y - a.y);
    if (values.length === 0) return this.hideTip();
    const rows = values.map((value) => make("tr", { "data-run": value.run },
      make("th", { scope: "row" }, swatch(value.run), document.createTextNode(runs[value.run].label)),
      make("td", { text: formatNumber(value.y) }),
      make("td", { class: "soft", text: value.rawY === null ? "" : formatNumber(value.rawY) }),
      make("td", { class: "soft", text: `@ ${formatTick(value.x)}` })));
    const counted = this.view.axis === "steps" || this.view.axis === "samples";
    const head = `${formatTick(counted ? Math.round(x) : x)} ${this.unit().name}`;
    this.tip.replaceChildren(make("div", { class: "soft", text: head }), make("table", {}, ...rows));
    this.tip.hidden = false;
    this.placeTip(left);
  }

  // Below the plot, where it hides no curve; above it where there is no room.
  placeTip(left) {
    const { over } = this.plot;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const wanted = over.offsetLeft + left - width / 2;
    this.tip.style.left = `${Math.max(0, Math.min(this.area.clientWidth - width, wanted))}px`;
    const room = innerHeight - over.getBoundingClientRect().bottom;
    const above = room < height + 12;
    this.tip.style.top = `${over.offsetTop + (above ? -height - 6 : over.clientHeight + 6)}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  fillTable() {
    if (!this.details.open) return;
    const [low, high] = this.range();
    const shown = this.curveList;
    const known = new Set(shown.flatMap((curve) => curve.x.filter((x) => x >= low && x <= high)));
    const all = [...known].sort((a, b) => a - b);
    const last = all.length - 1;
    const places = Array.from({ length: Math.min(NUM_TABLE_ROWS, all.length) },
      (_, i) => last < NUM_TABLE_ROWS ? i : Math.round(i * last / (NUM_TABLE_ROWS - 1)));
    const rows = places.map((place) => {
      const values = new Map(this.valuesAt(all[place]).map((value) => [value.run, value.y]));
      const cells = shown.map(({ run }) => make("td", { text: formatNumber(values.get(run)) }));
      return make("tr", {}, make("th", { scope: "row", text: formatTick(all[place]) }), ...cells);
    });
    const heads = shown.map(({ run }) => make("th", { scope: "col", text: runs[run].label }));
    this.table.replaceChildren(make("table", {},
      make("caption", { class: "hidden", text: `${this.title} by ${this.unit().name}` }),
      make("thead", {}, make("tr", {}, make("th", { scope: "col", text: this.unit().name }), ...heads)),
      make("tbody", {}, ...rows)));
  }
}

function formatTick(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return formatCount(value);
  return size !== 0 && size < 1e-3 ? formatNumber(value) : String(Number(value.toPrecision(4)));
}

// Ticks of a logarithmic axis: 1, 2, 5 of each power of ten; within half a decade evenly spaced.
function logTicks(isLog) {
  if (!isLog) return {};
  const splits = (_, axis, low, high) => {
    const decades = Math.log10(high / low);
    if (decades <= 0.5) return evenTicks(low, high);
    const digits = decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 6, 8];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      ticks.push(...digits.map((digit) => digit * 10 ** power));
    }
    const inside = ticks.filter((tick) => tick >= low && tick <= high);
    const step = Math.ceil(inside.length / 7);
    return inside.filter((_, i) => i % step === 0);
  };
  return { splits, filter: (_, ticks) => ticks };
}

function evenTicks(low, high) {
  const rough = (high - low) / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((digit) => digit * power >= rough) * power;
  const first = Math.ceil(low / step);
  const count = Math.max(0, Math.floor(high / step) - first + 1);
  return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function widthOf(texts) {
  const longest = Math.max(0, ...(texts || []).map((text) => text.length));
  return 16 + 7 * Math.max(3, longest);
}

// Range of y with room above and below.
function padded(low, high, isLog) {
  if (low === null || high === null) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  const room = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Curves have points at different x: of each the nearest point is marked.
function nearestIndex(plot, series, index) {
  const values = plot.data[series];
  for (let away = 0; away < values.length; away++) {
    for (const place of [index - away, index + away]) {
      if (values[place] !== null && values[place] !== undefined) return place;
    }
  }
  return index;
}
