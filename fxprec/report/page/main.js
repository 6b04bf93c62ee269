// The sections, in the order of the page.
const saved = raw.saved, MANY_GROUPS = 12;

function header() {
  const asked = raw.peak ? `${raw.peak.kinds.includes("weights") ? "step" : "peak"} budget ${bytes(raw.peak.budget)}` : raw.budget !== null ? `budget ${bytes(raw.budget)}` : `ratio ${raw.asked} asked`;
  $("head").textContent = `recipe ${raw.recipe.name}, ${raw.storage} storage, policy ${raw.policy}${raw.grouping === "execution" ? "" : " by data flow"}; ${asked}, ${raw.reached.toFixed(4)} of ${short(raw.elements)} elements low`;
  const used = Object.entries(raw.bits).map(([name, bits]) => [width(bits), name]);
  const kinds = [["b8", "up to 8 bits"], ["b16", "up to 16"], ["b32", "more"]].filter(([cls]) => used.some(([c]) => c === cls));
  $("legend").append(...kinds.flatMap(([cls, text]) => [el("span", { class: `swatch ${cls}` }), `${text}: ${used.filter(([c]) => c === cls).map(([, name]) => name).join(", ")}`]),
    el("span", { class: "swatch b0" }), "no format chosen");
  for (const note of raw.notes) $("legend").after(el("p", { class: "hint" }, note));
  if (!raw.nodes) $("legend").after(el("p", { class: "hint" }, "There is no graph.json beside this plan, so tensors are drawn without edges."));
}

function bar(label, total, most, pieces, said) {
  const track = el("span", { class: "track" });
  for (const [size, cls, thin] of pieces) {
    const piece = el("i", { class: `${cls}${thin ? " thin" : ""}` });
    piece.style.width = `${100 * size / Math.max(most, 1)}%`;
    track.append(piece);
  }
  return el("div", { class: "bar" }, label, track, el("span", {}, said));
}
function memory() {
  if (!saved) { $("bars").append(el("p", { class: "hint" }, "Nothing: this graph has no backward half.")); return; }
  const row = (name, size, cls) => bar(el("span", {}, name), size, saved.fp32, [[size, cls]], `${bytes(size)}, ${(size / Math.max(saved.fp32, 1)).toFixed(2)}x`);
  $("bars").append(row("float32", saved.fp32, "b32"), row("bf16", saved.bf16, "b16"), row("planned", saved.planned, "b8"));
  if (raw.peak) $("peak").append(...peakOver(raw.peak));
  if (groups.some(g => g.savedElements === null)) return;
  const largest = groups.toSorted((a, b) => b.savedElements - a.savedElements || a.id - b.id), most = 4 * (largest[0]?.savedElements ?? 0);
  const rows = largest.map(g => () => bar(goTo(g, `group ${g.id}`), g.savedBytes, most, [[4 * g.savedElements, "b32"], [2 * g.savedElements, "b16"], [g.savedBytes, "b8", true]],
    `${bytes(g.savedBytes)} of ${bytes(4 * g.savedElements)}`));
  const list = el("div", {}, ...rows.slice(0, MANY_GROUPS).map(make => make()));
  $("by-group").append(el("h3", {}, "By group, largest first: planned (thin) before bf16 and float32"), list);
  if (rows.length > MANY_GROUPS) {
    const more = el("button", { onclick: () => { list.append(...rows.slice(MANY_GROUPS).map(make => make())); more.remove(); } }, `${rows.length - MANY_GROUPS} more`);
    list.after(more);
  }
}

function demotion() {
  const points = raw.curve.map(([n, reached, size, error, damage]) => ({ n, reached, size, error, damage }));
  const measured = points.some(p => p.damage !== null), r = raw.reached;
  const charts = el("div", { class: "charts" });
  if (points.every(p => p.size !== null)) charts.append(chart([{ points: points.map(p => [p.reached, p.size]), cls: "b8" }], { caption: "bytes saved for backward, by share of elements low", y: bytes, now: r }));
  charts.append(measured ? chart([{ points: points.map(p => [p.reached, p.damage]), cls: "b32" }], { caption: "measured loss added (first order), by share of elements low", y: v => +v.toPrecision(2), now: r })
    : chart([{ points: points.map(p => [p.reached, p.error]), cls: "b32" }], { caption: "predicted rounding error (relative), by share of elements low", y: percent, now: r }));
  $("curve").append(charts);
  const here = raw.ratios.findIndex(([, reached]) => Math.abs(reached - r) < 1e-6);
  const rows = raw.ratios.map(([n, reached, size, error, damage], i) => ({ ratio: (i + 1) / 10, n, reached, size, error, damage, now: i === here }));
  const columns = [
    { name: "r", value: p => p.ratio, number: true }, { name: "groups low", value: p => p.n, number: true },
    { name: "reached", value: p => p.reached, show: p => p.reached.toFixed(4), number: true },
    { name: "saved", value: p => p.size, show: p => bytes(p.size), number: true },
    { name: "of float32", value: p => p.size, show: p => saved && p.size !== null ? `${(p.size / Math.max(saved.fp32, 1)).toFixed(2)}x` : "?", number: true },
    { name: "rounding error", value: p => p.error, show: p => percent(p.error), number: true },
    { name: "SQNR", value: p => -p.error, show: p => `${(-20 * Math.log10(p.error)).toFixed(1)} dB`, number: true },
  ];
  if (measured) columns.push({ name: "loss added", value: p => p.damage, show: p => +p.damage.toPrecision(3), number: true });
  table($("ratios"), columns, rows, { mark: row => row.now });
  $("error-note").textContent = "Rounding error: root mean square over all stored elements, from the formats' mantissas alone (log-uniform values, no over- or underflow). "
    + (["size", "size-ascending", "random"].includes(raw.policy) ? "" : `Policy ${raw.policy} chooses again for each ratio; the curve follows this plan's order of groups. `)
    + "The dashed line is this plan.";
  const order = groups.toSorted((a, b) => a.order - b.order);
  $("order").append(el("h3", {}, "Order of demotion"), el("div", { class: "chips" }, ...order.map((g, i) =>
    el("button", { class: g.low ? "b8" : "b16", title: `${g.low ? "low" : "high"}; ${percent(points[i + 1].reached)} low once it and all before it are demoted`, onclick: () => { select(g); $("graph").scrollIntoView({ block: "nearest" }); } }, g.id))));
}

function training() {
  const place = $("history"), promoted = sites.filter(s => s.promoted !== null).sort((a, b) => a.promoted - b.promoted || a.id - b.id);
  if (!raw.history.length && !promoted.length) {
    place.append(el("p", { class: "hint" }, "No statistics yet. Training with dump= writes stats.jsonl; then \u201cfxprec report\u201d on this folder draws them."));
    return;
  }
  const charts = el("div", { class: "charts" }), worst = new Map(), note = (step, name, value) => {
    if (!worst.has(step)) worst.set(step, { overflow: 0, underflow: 0 });
    if (value !== null) worst.get(step)[name] = Math.max(worst.get(step)[name], value);
  };
  for (const h of raw.history) h.steps.forEach((step, i) => { note(step, "overflow", h.overflow[i]); note(step, "underflow", h.underflow[i]); });
  const steps = [...worst.keys()].sort((a, b) => a - b), line = name => steps.map(step => [step, worst.get(step)[name]]);
  if (steps.length) charts.append(chart([{ points: line("overflow"), cls: "b32", name: "overflow" }, { points: line("underflow"), cls: "b8", name: "underflow" }], { caption: "largest share of any tensor by step", y: percent }));
  if (promoted.length) {
    const last = Math.max(steps.at(-1) ?? 0, promoted.at(-1).promoted);
    charts.append(chart([{ points: [[0, 0], ...promoted.flatMap((s, i) => [[s.promoted, i], [s.promoted, i + 1]]), [last, promoted.length]], cls: "b16" }], {
      caption: `${promoted.length} promotions by step (click one)`,
      dots: promoted.map((s, i) => ({ at: [s.promoted, i + 1], cls: "b16 promotion", title: `${s.tensor} at step ${s.promoted}`, onclick: () => select(s.node ?? groups[s.group]) })),
    }));
  }
  place.append(charts);
  if (!promoted.length) place.append(el("p", { class: "hint" }, "No tensor was promoted."));
  if (raw.history.length) historyTable(place);
}
function historyTable(place) {
  const top = values => values.reduce((a, b) => Math.max(a, b ?? 0), 0);
  const rows = raw.history.map(h => ({ ...h, of: sites[h.site], over: top(h.overflow), under: top(h.underflow) })).sort((a, b) => b.over - a.over || b.under - a.under || a.row - b.row);
  const into = el("table", { id: "history-table" });
  place.append(el("h3", {}, "By tensor, worst first"), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Statistics" }, into));
  const scale = h => h.scale ? h.scale.at(-1) : null;
  table(into, [
    { name: "row", value: h => h.row, number: true },
    { name: "tensor", value: h => h.of.tensor, show: h => h.of.node ? goTo(h.of.node, h.of.tensor) : h.of.tensor },
    { name: "kind", value: h => h.of.kind }, { name: "format", value: h => h.of.format, show: h => el("span", { class: `format ${h.of.cls}` }, h.of.format) },
    { name: "overflow", value: h => h.over, show: h => percent(h.over), number: true }, { name: "", value: h => h.over, show: h => spark(h.overflow, "b32") },
    { name: "underflow", value: h => h.under, show: h => percent(h.under), number: true }, { name: "", value: h => h.under, show: h => spark(h.underflow, "b8") },
    { name: "log2 amax", value: h => h.amax.at(-1), show: h => h.amax.at(-1) ?? "", number: true },
    { name: "scale", value: scale, show: h => scale(h) ?? "", number: true },
  ], rows);
}

function searching() {
  const box = $("search"), show = siteTable();
  let found = [], at = -1;
  const has = (words, ...texts) => words.every(word => texts.some(text => text.toLowerCase().includes(word)));
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = words.length ? nodes.filter(n => has(words, n.name, n.op, n.module, n.source, ...n.sites.flatMap(s => [s.tensor, s.format, s.kind, s.reads]))) : [];
    const rows = words.length ? sites.filter(s => has(words, s.tensor, s.kind, s.module, s.source, s.format, s.reads)) : sites;
    hits = new Set([...found, ...found.map(n => groups[n.group])]);
    at = -1;
    show(rows);
    $("found").textContent = words.length ? `${count(rows.length)} of ${count(sites.length)} tensors, ${count(found.length)} nodes${found.length ? "; Enter shows them in turn" : ""}` : "";
    drawn = null;
    draw();
  });
  box.addEventListener("keydown", event => {
    if (event.key === "Enter" && found.length) { at = (at + (event.shiftKey ? found.length - 1 : 1)) % found.length; select(found[at]); }
    else if (event.key === "Escape") { box.value = ""; box.dispatchEvent(new Event("input")); }
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !["INPUT", "TEXTAREA"].includes(document.activeElement.tagName)) { event.preventDefault(); box.focus(); }
  });
}

header();
columns = columnsFor(size().w / size().h);
if (nodes.length <= OPEN_ALL_UP_TO && groups.length <= 12) for (const group of groups) open.add(group.id);
place();
fit();
listen();
memory();
demotion();
training();
dumpedTensors();
gemmTable();
searching();
