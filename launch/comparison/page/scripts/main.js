// Build the page and keep it up to date.

const sectionOf = (name) => document.getElementById(name);

const tables = [fillVerdict(sectionOf("verdict"))];
sectionOf("verdict").after(makeControls());
fillCharts(sectionOf("charts"));
fillCompute(sectionOf("compute"));
tables.push(fillMetrics(sectionOf("metrics")), fillParameters(sectionOf("parameters")));
tables.push(fillAttempts(sectionOf("attempts")));
fillPictures(sectionOf("pictures"));

for (const section of document.querySelectorAll("main > section")) {
  const title = section.id === "verdict" ? "Verdict" : section.querySelector("h2").textContent;
  sectionOf("sections").append(make("a", { href: `#${section.id}`, text: title }));
}

const notes = ["Hours are from the first to the last " +
  "logged line, without recorded waits between attempts. Long curves are reduced to their extremes; smoothing averages all points."];
if (page.constant.length > 0) notes.push(`Always 0, left out: ${page.constant.join(", ")}.`);
sectionOf("notes").textContent = notes.join(" ");

function showRuns() {
  for (const element of document.querySelectorAll("main [data-run]")) {
    element.hidden = !state.shown[Number(element.dataset.run)];
  }
  for (const table of tables) table?.show();
}

onChange((changed) => {
  if (changed.has("shown")) showRuns();
  const onlyRange = changed.size === 1 && changed.has("range");
  for (const chart of charts) {
    const linked = chart.link !== null;
    if (onlyRange && linked) chart.applyRange();
    else if (linked || changed.has("shown")) chart.refresh();
  }
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.refresh();
});

addEventListener("beforeprint", () => {
  for (const chart of charts) chart.prepareForPaper();
});
addEventListener("afterprint", () => {
  for (const chart of charts) chart.resize();
});

// On a phone the controls would cover the charts: they start closed.
if (matchMedia("(max-width: 700px)").matches) document.querySelector(".controls").open = false;
