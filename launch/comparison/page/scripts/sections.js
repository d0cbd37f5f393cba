// The sections of the page, from the top.

const MAX_REASONS = 4, MAX_REASON_COLUMNS = 3;

function metricOf(key) {
  return page.metrics.find((metric) => metric.key === key);
}

function heading(section, text) {
  return make("h2", { id: `${section}-title`, text });
}

function bestRun(metric, values) {
  const numbers = values.map((value) => value === null ? NaN : Number(value));
  const known = numbers.filter(Number.isFinite);
  if (!metric.better || known.length < 2) return null;
  const best = metric.better === "higher" ? Math.max(...known) : Math.min(...known);
  return best;
}

function arrowOf(metric) {
  return { higher: " ↑", lower: " ↓" }[metric.better] || "";
}

// The verdict: one sentence, its reservations, and results next to what differs.
function fillVerdict(section) {
  const found = page.verdict;
  const table = runsTable(found);
  if (found === null || found.ranked.length < 2) {
    const text = runs.length > 1 ? "No metric says which run is better" : "Summary";
    section.append(heading("verdict", text), table.element, origins());
    return table;
  }
  const metric = metricOf(found.metric);
  const [first, second] = found.sides;
  const [best, next] = [first.value, second.value].map(Number);
  const where = page.budget ? ` ${page.budget}` : "";
  const title = make("h2", { id: "verdict-title", class: "verdict" });
  if (best === next) {
    title.append(bold(first.label), ` and `, bold(second.label),
      ` are level on ${metric.key}${where}: ${formatNumber(best)}`);
  } else {
    const kind = metric.better === "higher" ? "highest" : "lowest";
    const spread = first.deviation === null ? "" : ` ± ${formatNumber(first.deviation)}`;
    title.append(swatch(first.run), " ", bold(first.label),
      first.seeds > 1 ? ` have the ${kind} mean ` : ` has the ${kind} `,
      `${metric.key}${where}: `, bold(formatNumber(best)),
      `${spread} (${formatDelta(best - next)} against ${second.label})`);
  }
  section.append(title, ...reservations(found, Math.abs(best - next)).filter(Boolean), table.element, origins());
  return table;
}

// When, from which commit, on which data and by whom each run was made.
function origins() {
  const known = [...runs.keys()].filter((run) => runs[run].origin);
  return make("ul", { class: "reasons" }, ...known.map((run) =>
    make("li", { "data-run": run }, swatch(run), ` ${runs[run].label}: ${runs[run].origin}`)));
}

function bold(text) {
  return make("strong", { text });
}

// Why it may be so, and why that is not certain.
function reservations(found, margin) {
  const [first, second] = found.sides.map((side) => side.run);
  const keys = found.against_second;
  const value = (key, run) => {
    const param = page.params.find((each) => each.key === key);
    return shorten(param.values[run] ?? "not set", 40);
  };
  const items = keys.slice(0, MAX_REASONS).map((key) => make("li", {}, make("code", { text: key }),
    " ", make("b", { text: value(key, first) }), ` instead of ${value(key, second)}`));
  const doubts = [];
  if (keys.length === 0) doubts.push("No setting of the training differs between the two.");
  if (keys.length === 1) doubts.push("It is the only setting that differs.");
  if (keys.length > MAX_REASONS) doubts.push(`${keys.length - MAX_REASONS} more settings differ.`);
  if (keys.length > 1) doubts.push("Several settings differ, so the cause may be any of them.");
  if (found.unequal) {
    doubts.push(`They were reached with different numbers of ${found.unequal}: --at ${found.unequal} ` +
      "compares at equal ones.");
  }
  if (found.seed_deviation !== null && margin < 2 * found.seed_deviation) {
    doubts.push("The margin is within two standard deviations over seeds " +
      `(${formatNumber(found.seed_deviation)}).`);
  }
  return [
    keys.length > 0 ? make("ul", { class: "reasons" }, ...items) : null,
    doubts.length > 0 ? make("p", { class: "soft doubts", text: doubts.join(" ") }) : null,
  ];
}

function shorten(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function runsTable(found) {
  const metrics = (found ? found.headline : []).map(metricOf);
  const reasons = found && runs.length > 1 ? found.reasons.slice(0, MAX_REASON_COLUMNS) : [];
  const hasStatus = runs.some((run) => run.status);
  const columns = [
    { name: "run" },
    ...metrics.map((metric) => ({ name: metric.key + arrowOf(metric), group: page.budget ? capital(page.budget) : "Final value", numeric: true })),
    ...reasons.map((key) => ({ name: key, group: "What differs" })),
    ...AXES.map((axis) => ({ name: axis === "hours" ? "time" : AXIS_NAMES[axis].replace(/^S/, (c) => c.toLowerCase()), group: "Spent", numeric: true })),
    ...(hasStatus ? [{ name: "status", group: "Ended" }] : []),
  ];
  const order = found ? [...found.ranked, ...runs.keys()] : [...runs.keys()];
  const rows = [...new Set(order)].map((run) => ({
    run,
    cells: [
      { text: runs[run].label, title: runs[run].source, kind: "name" },
      ...metrics.map((metric) => metricCell(metric, run)),
      ...reasons.map((key) => paramCell(page.params.find((each) => each.key === key).values[run])),
      ...AXES.map((axis) => ({ text: formatSpent(axis, runs[run].totals[axis]), value: runs[run].totals[axis] })),
      ...(hasStatus ? [{ text: runs[run].status || ABSENT }] : []),
    ],
  }));
  return new SortedTable({ caption: "Runs: results, what differs, and what they spent", columns, rows });
}

// The value that is compared; the last one is noted where it is another.
function metricCell(metric, run) {
  const value = metric.compared[run];
  const last = metric.final[run];
  const isBest = value !== null && Number(value) === bestRun(metric, metric.compared);
  return {
    text: formatNumber(value), value: value === null ? null : Number(value), kind: isBest ? "best" : null,
    notes: last === null || last === value ? [] : [{ text: `end ${formatNumber(last)}`, kind: "soft" }],
  };
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function paramCell(value) {
  return { text: value === null ? ABSENT : value, title: value, kind: "mono" };
}

// Controls of all charts; they stay in view.
function makeControls() {
  const chips = runs.map((run, i) => make("label", { class: "chip" },
    make("input", {
      type: "checkbox", checked: true, "data-toggle": i,
      onchange: (event) => setShown(i, event.target.checked),
    }), swatch(i), make("span", { text: run.label })));
  const all = (visible, text) => make("button", {
    class: "quiet", type: "button", text, onclick: () => change({ shown: runs.map(() => visible) }),
  });
  const axes = AXES.map((axis) => make("label", {},
    make("input", {
      type: "radio", name: "axis", value: axis, checked: axis === state.axis,
      onchange: () => change({ axis, range: null }),
    }), make("span", { text: AXIS_NAMES[axis] })));
  const amount = make("output", { text: "0" });
  const slider = make("input", {
    type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: 0,
    oninput: (event) => {
      amount.textContent = event.target.value;
      change({ smoothing: Number(event.target.value) });
    },
  });
  const log = (name, text) => make("label", { class: "check" },
    make("input", {
      type: "checkbox", id: name, onchange: (event) => change({ [name]: event.target.checked, range: null }),
    }), make("span", { text }));
  const reset = make("button", {
    class: "quiet", id: "reset", type: "button", text: "Reset zoom", disabled: true,
    onclick: () => change({ range: null }),
  });
  const controls = make("details", { class: "controls", open: true },
    make("summary", {}, make("span", { text: "Runs and axes" }), make("span", { class: "legend" },
      ...runs.map((run, i) => make("span", { "data-run": i }, swatch(i), document.createTextNode(run.label))))),
    make("div", { class: "chips", role: "group", "aria-label": "Runs shown" },
      ...chips, ...(runs.length > 2 ? [all(true, "All"), all(false, "None")] : [])),
    make("div", { class: "settings" },
      make("fieldset", { class: "segments" }, make("legend", { class: "hidden", text: "x axis" }), ...axes),
      make("label", { class: "slider" }, make("span", { text: "Smoothing" }), slider, amount),
      log("logX", "Log x"), log("logY", "Log y"), reset));
  onChange((changed) => {
    if (changed.has("range")) reset.disabled = state.range === null;
    if (changed.has("shown")) {
      controls.querySelectorAll("[data-toggle]").forEach((box, i) => { box.checked = state.shown[i]; });
    }
  });
  return controls;
}

// Charts of all metrics, by group. They share x axis, zoom and cursor.
function fillCharts(section) {
  const view = {
    get axis() { return state.axis; },
    get logX() { return state.logX; },
    get logY() { return state.logY; },
    get range() { return state.range; },
    setRange: (range) => change({ range }),
  };
  const filter = make("input", {
    type: "search", placeholder: "Filter charts", "aria-label": "Filter charts", oninput: () => show(),
  });
  section.append(make("div", { class: "head" }, heading("charts", "Curves"), filter),
    make("p", { class: "soft keys", text: "Drag to zoom, double-click to reset." }));
  const groups = [];
  for (const metric of page.metrics) {
    let group = groups.find((each) => each.name === metric.group);
    if (!group) {
      group = { name: metric.group, charts: [], grid: make("div", { class: "grid" }) };
      group.element = make("div", {}, make("h3", { class: "group", text: metric.group }), group.grid);
      groups.push(group);
      section.append(group.element);
    }
    const skipped = metric.curves.reduce((sum, curve) => sum + (curve ? curve.num_not_finite : 0), 0);
    const chart = new Chart({
      key: metric.key, title: metric.key, view, link: "metrics",
      note: [metric.better ? `${metric.better} is better` : "",
        skipped ? `${skipped} values are not finite` : ""].filter(Boolean).join("; "),
      curves: () => shownCurves(metric, state.axis, state.smoothing),
      extent: () => extentOf(page.metrics, state.axis, state.logX),
    });
    group.charts.push(chart);
    group.grid.append(chart.card);
  }
  const show = () => {
    const text = filter.value.trim().toLowerCase();
    for (const group of groups) {
      for (const chart of group.charts) chart.card.hidden = !chart.key.toLowerCase().includes(text);
      group.element.hidden = group.charts.every((chart) => chart.card.hidden);
    }
  };
}

function shownCurves(metric, axis, smoothing) {
  return runs.map((_, run) => state.shown[run] ? curveOf(metric, run, axis, smoothing) : null)
    .filter((curve) => curve !== null);
}

const extents = new Map();

// Lowest and highest x of the runs shown, so that all charts share one x axis.
function extentOf(metrics, axis, positive) {
  const key = [axis, positive, metrics.length, metrics[0]?.key, ...state.shown].join();
  if (!extents.has(key)) {
    let extent = null;
    for (const metric of metrics) {
      for (const { x } of shownCurves(metric, axis, 0)) {
        const first = positive ? x.find((value) => value > 0) : x[0];
        if (first === undefined) continue;
        const last = x[x.length - 1];
        extent = extent ? [Math.min(extent[0], first), Math.max(extent[1], last)] : [first, last];
      }
    }
    extents.set(key, extent);
  }
  return extents.get(key);
}

// One chart of a quality metric against what was spent for it.
function fillCompute(section) {
  const quality = page.metrics.filter((metric) =>
    metric.better && (metric.group === "val" || metric.key === "train/loss"));
  const axes = ["flops", "samples", "hours", "steps"].filter((axis) => AXES.includes(axis));
  if (quality.length === 0) return section.remove();
  const chosen = {
    metric: metricOf(page.verdict?.metric) || quality[0], axis: axes[0], logX: true, logY: false, range: null,
    setRange: (range) => { chosen.range = range; chart.applyRange(); },
  };
  const titleOf = () => `${chosen.metric.key} against ${AXIS_NAMES[chosen.axis]}`;
  const update = (values) => {
    Object.assign(chosen, values, { range: null });
    chart.setTitle(titleOf());
    chart.draw();
  };
  const select = (label, values, names, current, onpick) => make("label", {}, make("span", { text: label }),
    make("select", { onchange: (event) => onpick(event.target.selectedIndex) },
      ...values.map((value, i) => make("option", { text: names[i], selected: value === current }))));
  const chart = new Chart({
    key: "compute", title: titleOf(), view: chosen, link: null,
    note: "each run alone, without the training it started from",
    curves: () => shownCurves(chosen.metric, chosen.axis, 0),
    extent: () => extentOf([chosen.metric], chosen.axis, chosen.logX),
  });
  section.append(heading("compute", "Accuracy against compute"),
    make("div", { class: "settings" },
      select("Metric", quality, quality.map((metric) => metric.key), chosen.metric,
        (i) => update({ metric: quality[i] })),
      select("Against", axes, axes.map((axis) => AXIS_NAMES[axis]), chosen.axis, (i) => update({ axis: axes[i] })),
      make("label", { class: "check" }, make("input", {
        type: "checkbox", checked: true, onchange: (event) => update({ logX: event.target.checked }),
      }), make("span", { text: "Log x" }))),
    chart.card);
}

// Final and best values of all metrics.
function fillMetrics(section) {
  const columns = [
    { name: "metric" }, ...runs.map((run, i) => ({ name: run.label, run: i, numeric: true })),
    ...page.seeds.map((group) => ({ name: `mean of ${group.label}`, numeric: true })),
  ];
  const rows = page.metrics.map((metric) => ({
    cells: [
      { text: metric.key + arrowOf(metric), kind: "mono" },
      ...runs.map((_, run) => {
        const cell = metricCell(metric, run);
        return { ...cell, notes: [...metricNotes(metric, run), ...cell.notes] };
      }),
      ...page.seeds.map((_, group) => spreadCell(metric.seeds[group])),
    ],
  }));
  const table = new SortedTable({ caption: "Final and best metrics", columns, rows, filter: "Filter metrics" });
  section.append(make("div", { class: "head" }, heading("metrics", "Metrics"), table.filter, table.count),
    make("p", { class: "soft", text: metricsNote() }),
    table.element);
  return table;
}

function metricsNote() {
  const value = page.budget ? `Last value logged ${page.budget}` : "Last value logged";
  const seeds = page.seeds.length > 0 ? " Means have the standard deviation over seeds." : "";
  return `${value}; below it the difference to the first run and the best value.${seeds}`;
}

function spreadCell(spread) {
  if (!spread) return { text: ABSENT };
  return {
    text: formatNumber(spread.mean), value: spread.mean,
    notes: [{ text: `± ${formatNumber(spread.deviation)}, ${spread.count} seeds`, kind: "soft" }],
  };
}

function metricNotes(metric, run) {
  const notes = [];
  const [value, first, best] = [metric.compared[run], metric.compared[0], metric.best[run]].map(
    (each) => each === null ? NaN : Number(each));
  const delta = value - first;
  if (run > 0 && Number.isFinite(delta)) {
    const better = delta !== 0 && metric.better && (delta > 0) === (metric.better === "higher");
    const kind = delta === 0 || !metric.better ? "soft" : better ? "better" : "worse";
    notes.push({ text: delta === 0 ? "equal" : formatDelta(delta) + (kind === "soft" ? "" : ` ${kind}`), kind });
  }
  if (Number.isFinite(best) && best !== value) notes.push({ text: `best ${formatNumber(best)}`, kind: "soft" });
  return notes;
}

function fillParameters(section) {
  if (page.params.length === 0) return section.remove();
  const only = make("input", { type: "checkbox", id: "only-differing", onchange: () => table.show() });
  only.checked = runs.length > 1;
  const table = new SortedTable({
    caption: "Parameters", filter: "Filter parameters",
    columns: [{ name: "parameter" }, ...runs.map((run, i) => ({ name: run.label, run: i }))],
    rows: page.params.map((param) => ({
      differs: param.differs, cells: [{ text: param.key, kind: "mono" }, ...param.values.map(paramCell)],
    })),
    keep: (row) => !only.checked || row.differs,
  });
  const choice = make("label", { class: "check" }, only, make("span", { text: "Only differing" }));
  section.append(make("div", { class: "head" }, heading("parameters", "Parameters"), table.filter,
    ...(runs.length > 1 ? [choice] : []), table.count), table.element);
  return table;
}

// Every start of the runs that recorded theirs.
function fillAttempts(section) {
  const rows = runs.flatMap((run, i) => run.attempts.map((attempt) => ({
    run: i,
    cells: [
      { text: run.label, kind: "name" },
      { text: String(attempt.number), value: attempt.number },
      { text: new Date(1000 * attempt.started).toISOString().slice(0, 16).replace("T", " "), value: attempt.started },
      { text: formatTotal("hours", attempt.hours), value: attempt.hours },
      { text: attempt.ending || "running", title: attempt.reason },
      { text: attempt.reason || ABSENT, title: attempt.reason },
      { text: formatCount(attempt.steps_gained), value: attempt.steps_gained },
      { text: attempt.seconds_lost === null ? ABSENT : `${Math.round(attempt.seconds_lost)} s`, value: attempt.seconds_lost },
      { text: attempt.nodes.join(", "), title: attempt.job },
    ],
  })));
  if (rows.length === 0) return section.remove();
  const names = ["run", "attempt", "started (UTC)", "ran for", "ended", "why", "steps gained", "lost", "nodes"];
  const numeric = new Set(["attempt", "ran for", "steps gained", "lost"]);
  const table = new SortedTable({
    caption: "Attempts", columns: names.map((name) => ({ name, numeric: numeric.has(name) })), rows,
  });
  section.append(make("div", { class: "head" }, heading("attempts", "Attempts")), table.element);
  return table;
}

function fillPictures(section) {
  const { rows, num_left_out: numLeftOut } = page.pictures;
  if (rows.length === 0) return section.remove();
  section.append(heading("pictures", "Pictures"));
  const dialog = document.getElementById("enlarged");
  dialog.addEventListener("click", () => dialog.close());
  for (const { name, files } of rows) {
    const figures = files.map((file, run) => file === null ? null : make("figure", { class: "card", "data-run": run },
      make("figcaption", {}, swatch(run), make("span", { text: runs[run].label })),
      make("button", {
        type: "button", class: "picture", "aria-label": `Enlarge ${name} of ${runs[run].label}`,
        onclick: (event) => {
          dialog.replaceChildren(event.currentTarget.firstChild.cloneNode(),
            make("button", { type: "button", text: "Close" }));
          dialog.showModal();
        },
      }, make("img", { alt: `${name} of ${runs[run].label}`, loading: "lazy", src: `data:image/png;base64,${file}` }))));
    section.append(make("h3", { class: "group", text: name }),
      make("div", { class: "pictures" }, ...figures.filter((figure) => figure !== null)));
  }
  if (numLeftOut) {
    section.append(make("p", { class: "soft", text: `${numLeftOut} more are in pictures/ of the run folders.` }));
  }
}
