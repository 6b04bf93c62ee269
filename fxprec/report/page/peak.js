// Live bytes over the step, and what it would hold and take under other budgets.
const WAYS = ["b16", "b8", "b4", "again", "b32", "b0"], THERE = ["weights", "states"];  // a step budget counts these too
const classes = kinds => kinds.length > WAYS.length ? [...THERE, ...WAYS] : WAYS;
const time = s => s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(1e3 * s).toPrecision(3)} ms` : `${(1e6 * s).toPrecision(3)} µs`;

function peakOver(peak) {
  const measured = peak.compiled === null ? "" : `; ${bytes(peak.compiled)} as compiled`;
  const shared = peak.graphs > 1 ? `; the budget of ${bytes(peak.budget)} is shared by ${peak.graphs} graphs of the step` : "";
  const beside = peak.beside ? `, while ${bytes(peak.beside)} of other graphs are held` : "";
  const caption = `forward, then backward; at most ${bytes(peak.planned)} predicted${measured}, and ${bytes(peak.high)} with everything kept high${beside}${shared}`;
  const found = [el("h3", {}, `Live bytes over the step, as predicted${peak.compiledLive.length ? "; the line is as compiled" : ""}`), areas(peak.live, peak.kinds, classes(peak.kinds), { caption, level: peak.room, levelName: `budget ${bytes(peak.room)}`, over: peak.compiledLive, overName: "as compiled" })];
  return peak.points.length ? [...found, ...slider(peak)] : found;
}

function slider(peak) {
  const points = peak.points, fastest = least(points.map(p => p.seconds), Infinity), top = most(points.map(p => p.peak), 1);
  const picture = el("div"), said = el("output", { id: "point", for: "points" });
  const input = el("input", { id: "points", type: "range", min: 0, max: points.length - 1, step: 1, value: 0, "aria-label": "peak of the step", oninput: show });
  function show() {
    const p = points[+input.value], more = p.seconds / fastest - 1;
    const words = `${bytes(p.peak)} at the peak, ${time(p.seconds)} predicted${more >= 5e-4 ? `, ${percent(more)} more than the fastest` : ""}`;
    said.value = +input.value ? words : `${words}; everything kept high`;
    input.setAttribute("aria-valuetext", said.value);
    picture.replaceChildren(areas(p.live, peak.kinds, classes(peak.kinds), { caption: "live bytes under this budget", level: p.peak, levelName: bytes(p.peak), top }));
  }
  const curve = chart([{ points: points.map(p => [p.peak, p.seconds]).toReversed(), cls: "b8" }], {
    caption: "predicted time of a step by its peak, from rough rates of the device: compare points with each other only", x: bytes, y: time, zero: false, now: peak.planned });
  show();
  return [el("h3", {}, "Other budgets"), el("p", { class: "slide" }, input, said), picture, el("div", { class: "charts" }, curve)];
}
