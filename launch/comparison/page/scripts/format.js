// Numbers and units as text.

const ABSENT = "–";

function formatNumber(value) {
  if (value === null || value === undefined) return ABSENT;
  const number = Number(value);
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e5 || size < 1e-4) {
    return number.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  }
  const text = size >= 1e4 ? number.toFixed(0) : String(Number(number.toPrecision(4)));
  return text.replace("-", "−");
}

function formatDelta(value) {
  return (value > 0 ? "+" : "") + formatNumber(value);
}

const PREFIXES = ["", "k", "M", "G", "T", "P", "E", "Z", "Y"];

// The unit in which totals of an axis up to `most` are readable: {label, name, scale}.
function unitOf(axis, most) {
  if (axis === "hours") {
    if (most < 1 / 30) return { name: "seconds", short: "s", scale: 3600 };
    if (most < 1.5) return { name: "minutes", short: "min", scale: 60 };
    if (most >= 100) return { name: "days", short: "d", scale: 1 / 24 };
    return { name: "hours", short: "h", scale: 1 };
  }
  if (axis === "flops") {
    const power = Math.max(0, Math.min(8, Math.floor(Math.log10(Math.max(most, 1)) / 3)));
    const name = `${PREFIXES[power]}FLOPs`;
    return { name, short: name, scale: 10 ** (-3 * power) };
  }
  return { name: axis, short: axis, scale: 1 };
}

function formatCount(value) {
  if (Math.abs(value) < 1e4) return String(Number(value.toPrecision(5)));
  const power = Math.min(8, Math.floor(Math.log10(Math.abs(value)) / 3));
  return `${Number((value / 10 ** (3 * power)).toPrecision(4))}${PREFIXES[power]}`;
}

// For a column that names the axis.
function formatSpent(axis, value) {
  if (value === null || axis === "hours") return formatTotal(axis, value);
  return formatCount(value);
}

function formatTotal(axis, value) {
  if (value === null || value === undefined) return ABSENT;
  if (axis === "steps" || axis === "samples") return formatCount(value);
  const unit = unitOf(axis, value);
  return `${Number((value * unit.scale).toPrecision(3))} ${unit.short}`;
}

const AXIS_NAMES = { steps: "Steps", samples: "Samples", hours: "Hours", flops: "FLOPs" };
