// Line charts and sparklines.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(s => s * power >= rough) * power, found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

// series: [{points: [[x, y or null], ...], cls, name}]; options: caption, y (label of a tick), x, now (x of a vertical line), dots
function chart(series, { caption, x = plain, y = plain, now = null, dots = null, zero = true }) {
  const W = 420, H = 190, L = 62, R = 10, top = 8, bottom = 24;
  const points = series.flatMap(s => s.points).filter(p => p[1] !== null);
  if (!points.length) return el("figure", {}, el("figcaption", {}, `${caption}: nothing to draw`));
  const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  const x0 = least(xs, Infinity), x1 = Math.max(most(xs, -Infinity), x0 + 1e-9);
  const low = least(ys, zero ? 0 : Infinity), high = most(ys, -Infinity), room = zero || high > low ? 0 : 0.5;
  const y0 = low - room, y1 = Math.max(high + room, y0 + 1e-9);
  const X = v => L + (W - L - R) * (v - x0) / (x1 - x0), Y = v => H - bottom - (H - top - bottom) * (v - y0) / (y1 - y0);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": caption });
  const unit = y === bytes ? 1024 ** Math.floor(Math.log(y1) / Math.log(1024)) : 1;
  for (const t of ticks(y0 / unit, y1 / unit, 4).map(t => t * unit)) picture.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: Y(t), y2: Y(t) }), svg("text", { x: L - 6, y: Y(t) + 4, "text-anchor": "end" }, y(t)));
  for (const t of ticks(x0, x1, 5)) picture.append(svg("text", { x: X(t), y: H - 7, "text-anchor": "middle" }, x(t)));
  if (now !== null && now >= x0 && now <= x1) picture.append(svg("line", { class: "now", x1: X(now), x2: X(now), y1: top, y2: H - bottom }));
  for (const { points, cls } of series) {
    let path = "", pen = "M";
    for (const [a, b] of points) {
      if (b === null) { pen = "M"; continue; }
      path += `${pen}${X(a).toFixed(1)},${Y(b).toFixed(1)}`;
      pen = "L";
    }
    picture.append(svg("path", { class: cls, d: path }));
    if (points.length === 1 && path) picture.append(svg("circle", { class: cls, cx: X(points[0][0]), cy: Y(points[0][1]), r: 3 }));
  }
  for (const { at, cls, title, onclick } of dots ?? []) picture.append(svg("circle", { class: cls, cx: X(at[0]), cy: Y(at[1]), r: 5, onclick }, svg("title", {}, title)));
  const names = series.filter(s => s.name).flatMap(s => [el("span", { class: `swatch ${s.cls}` }), s.name]);
  return el("figure", {}, picture, el("figcaption", {}, caption, names.length ? ": " : "", ...names));
}

// rows: for each moment its parts, stacked in the order of names; level: a line across, with its name; top: least height;
// over: heights of another line over the same step
function areas(rows, names, classes, { caption, level, levelName, top: highest = 1, over = [], overName = "" }) {
  const W = 860, H = 240, L = 62, R = 10, top = 18, bottom = 24;
  const sums = rows.map(row => row.reduce((a, b) => a + b, 0)), y1 = Math.max(level, ...sums, ...over, highest);
  const X = i => L + (W - L - R) * i / Math.max(rows.length - 1, 1), Y = v => H - bottom - (H - top - bottom) * v / y1;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": caption });
  const unit = 1024 ** Math.floor(Math.log(y1) / Math.log(1024));
  for (const t of ticks(0, y1 / unit, 4).map(t => t * unit)) picture.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: Y(t), y2: Y(t) }), svg("text", { x: L - 6, y: Y(t) + 4, "text-anchor": "end" }, bytes(t)));
  let below = rows.map(() => 0);
  names.forEach((name, k) => {
    const above = rows.map((row, i) => below[i] + row[k]);
    const edge = above.map((v, i) => `${X(i).toFixed(1)},${Y(v).toFixed(1)}`), back = below.map((v, i) => `${X(i).toFixed(1)},${Y(v).toFixed(1)}`).reverse();
    picture.append(svg("path", { class: `area ${classes[k]}`, d: `M${edge.join("L")}L${back.join("L")}Z` }, svg("title", {}, name)));
    below = above;
  });
  if (over.length) {
    const at = i => L + (W - L - R) * i / Math.max(over.length - 1, 1);
    picture.append(svg("path", { class: "over", d: `M${over.map((v, i) => `${at(i).toFixed(1)},${Y(v).toFixed(1)}`).join("L")}` }, svg("title", {}, overName)));
  }
  picture.append(svg("line", { class: "now", x1: L, x2: W - R, y1: Y(level), y2: Y(level) }), svg("text", { x: W - R, y: Y(level) - 4, "text-anchor": "end" }, levelName));
  const legend = names.flatMap((name, k) => [el("span", { class: `swatch ${classes[k]}` }), name]);
  if (over.length) legend.push(el("span", { class: "swatch over" }), overName);
  return el("figure", {}, picture, el("figcaption", {}, caption, ": ", ...legend));
}

// Elements by exponent of two; range: exponents of the smallest and the largest number of the format, or null
function histogram({ first, counts }, range, caption) {
  const W = 420, H = 190, L = 62, R = 10, top = 8, bottom = 24, most = counts.reduce((a, b) => Math.max(a, b), 1);
  const low = Math.min(first, range ? Math.floor(range[0]) : first) - 1, last = first + counts.length - 1;
  const high = Math.max(last, range && range[1] < last + 40 ? Math.ceil(range[1]) : last) + 1, span = high - low + 1;
  const X = e => L + (W - L - R) * (e - low) / span, Y = n => H - bottom - (H - top - bottom) * Math.log1p(n) / Math.log1p(most);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": caption });
  for (let n = 1; n <= most; n *= 10) picture.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: Y(n), y2: Y(n) }), svg("text", { x: L - 6, y: Y(n) + 4, "text-anchor": "end" }, short(n)));
  for (const t of ticks(low, high, 6).filter(Number.isInteger)) picture.append(svg("text", { x: X(t + .5), y: H - 7, "text-anchor": "middle" }, `2^${t}`));
  counts.forEach((n, i) => {
    const e = first + i, out = range && (e < range[0] - 1 || e > range[1]);
    if (n) picture.append(svg("rect", { class: `part ${out ? "b32" : "b8"}`, x: X(e), width: Math.max(X(e + 1) - X(e) - 1, .5), y: Y(n), height: H - bottom - Y(n) }, svg("title", {}, `2^${e}: ${count(n)} elements`)));
  });
  for (const end of range ?? []) if (end >= low && end <= high) picture.append(svg("line", { class: "now", x1: X(end), x2: X(end), y1: top, y2: H - bottom }));
  return el("figure", {}, picture, el("figcaption", {}, caption));
}

function spark(values, cls) {
  const known = values.filter(v => v !== null), high = known.reduce((a, b) => Math.max(a, b), 1e-9);
  const step = 100 / Math.max(values.length - 1, 1);
  let path = "", pen = "M";
  values.forEach((v, i) => {
    if (v === null) { pen = "M"; return; }
    path += `${pen}${(i * step).toFixed(1)},${(19 - 18 * v / high).toFixed(1)}`;
    pen = "L";
  });
  return svg("svg", { class: `chart spark ${cls}`, viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d: path }));
}
