// Curves as numbers: unpacking, converting steps to another axis, smoothing, looking up values.

const unpacked = new Map();

// Array `index` of the page: base64 of little-endian float32.
function floats(index) {
  if (!unpacked.has(index)) {
    const text = atob(page.arrays[index]);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    unpacked.set(index, new Float32Array(bytes.buffer));
  }
  return unpacked.get(index);
}

// The place of the last value that is not above `value`; -1 if all are.
function lastNotAbove(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearest(values, value) {
  const before = lastNotAbove(values, value);
  if (before < 0) return 0;
  if (before + 1 >= values.length) return values.length - 1;
  return value - values[before] <= values[before + 1] - value ? before : before + 1;
}

function interpolate(from, to, value) {
  const before = Math.max(0, Math.min(from.length - 2, lastNotAbove(from, value)));
  if (from.length < 2 || value <= from[0]) return to[0] * (value / from[0] || 0);
  const share = (value - from[before]) / (from[before + 1] - from[before]);
  return to[before] + Math.min(1, share) * (to[before + 1] - to[before]);
}

// Steps of a run on another axis; null where the run's totals on it are unknown.
function onAxis(run, axis, steps) {
  const { axes } = runs[run];
  if (axes[axis] === null) return null;
  if (axis === "steps") return Array.from(steps);
  const from = floats(axes.steps), to = floats(axes[axis]);
  return Array.from(steps, (step) => interpolate(from, to, step));
}

// Exponential moving average that starts unbiased, as Adam's moments do.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Fewer points, of an evaluation say, are drawn as they are.
const FEWEST_SMOOTHED = 20;

// {run, x, y, raw}: the curve of a run as drawn; raw: the unsmoothed points behind it, or null.
function curveOf(metric, run, axis, smoothing) {
  const packed = metric.curves[run];
  if (packed === null) return null;
  const x = onAxis(run, axis, floats(packed.x));
  if (x === null) return null;
  const y = Array.from(floats(packed.y));
  if (smoothing === 0 || y.length < FEWEST_SMOOTHED) return { run, x, y, raw: null };
  const hasMeans = packed.mean_x !== null;
  return {
    run,
    x: hasMeans ? onAxis(run, axis, floats(packed.mean_x)) : x,
    y: smoothed(hasMeans ? Array.from(floats(packed.mean_y)) : y, smoothing),
    raw: { x, y },
  };
}

// A logarithmic axis has no place for points that are not positive.
function positiveOnly(curve, logX, logY) {
  if (!logX && !logY) return curve;
  const keep = curve.x.map((x, i) => (!logX || x > 0) && (!logY || curve.y[i] > 0));
  return {
    ...curve,
    x: curve.x.filter((_, i) => keep[i]),
    y: curve.y.filter((_, i) => keep[i]),
  };
}
