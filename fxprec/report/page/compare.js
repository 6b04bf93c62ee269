// Two runs: the verdict, how many tensors have parted by step, each tensor, and one of them in detail.
const tensors = raw.tensors.map((t, id) => ({ ...t, id, apart: t.apart.map(d => d === null ? null : +d), step: t.parting?.step ?? null, difference: t.parting ? +t.parting.difference : null }));
const place = t => [t.module, t.source].filter(Boolean).join(", ");
const written = v => typeof v === "string" && !Number.isFinite(+v) ? v : String(+(+v).toPrecision(4));
const finite = v => Number.isFinite(v) ? v : null;
const exponent = v => v > 0 && Number.isFinite(v) ? Math.log2(v) : null;
const COLOURS = { update: "b16", forward: "b8", backward: "b32" };

function verdict() {
  const parted = tensors.filter(t => t.parting);
  $("head").textContent = `${raw.first} (first) and ${raw.second} (second): ${count(tensors.length)} tensors in both, ${count(raw.steps.length)} steps${raw.bitwise ? ", by hashes of their values" : ""}`;
  if (!parted.length) { $("said").textContent = raw.bitwise ? "They do not differ: every hash is equal." : `They do not differ by more than ${raw.tolerance}.`; $("said").classList.add("none"); }
  else {
    const first = raw.halves.filter(h => h.first).sort((a, b) => a.first.index - b.first.index);
    fill($("said"), {}, [`They first differ at step ${parted[0].step}, ${raw.halves.find(h => h.half === parted[0].half).first.said}. ${count(parted.length)} of ${count(tensors.length)} tensors differ.`]);
    const list = el("ul", {}, ...first.map(h => el("li", {}, `${h.half}: ${count(h.parted.length)} of ${count(h.tensors)} tensors, first at step ${h.parted[0]}: `,
      el("button", { class: "link", onclick: () => show(tensors[h.first.index], true) }, h.first.said))));
    $("said").after(list);
    const last = raw.steps.at(-1), line = h => [[raw.steps[0], 0], ...h.parted.flatMap((s, i) => [[s, i], [s, i + 1]]), [last, h.parted.length]].map(([s, n]) => [s, n / Math.max(h.tensors, 1)]);
    $("halves").append(chart(first.map(h => ({ points: line(h), cls: COLOURS[h.half], name: h.half })), { caption: "share of tensors that differ, by step", y: percent }));
  }
  for (const text of raw.differences) $("differences").append(el("li", {}, text));
  raw.only.forEach((names, i) => { if (names.length) $("differences").append(el("li", {}, `only in the ${i ? "second" : "first"}: ${names.join(", ")}`)); });
  if (!$("differences").children.length) $("differences").append(el("li", {}, "Nothing: one model, one set of options, one version."));
}

function show(t, scroll) {
  const formats = t.formats[0] === t.formats[1] ? t.formats[0] : t.formats.join(" and "), p = t.parting, series = v => zip(t.steps, v);
  const parts = [el("h3", {}, `${t.tensor} (${t.kind})`), el("p", {}, [place(t), t.half, formats].filter(Boolean).join("; "), p ? `: differs from step ${p.step} on by ${p.what}, ${written(p.ours)} and ${written(p.theirs)}` + (p.what === "hash" ? "" : ` (difference ${written(p.difference)})`) : ": does not differ")];
  const charts = el("div", { class: "charts" });
  charts.append(chart([{ points: series(t.amax[0].map(v => exponent(+v))), cls: "b8", name: raw.first }, { points: series(t.amax[1].map(v => exponent(+v))), cls: "b32", name: raw.second }], { caption: "largest magnitude, exponent of 2", zero: false, now: p?.step ?? null }));
  if (!raw.bitwise) charts.append(chart([{ points: series(t.apart.map(d => d > 0 && Number.isFinite(d) ? Math.log10(d) : null)), cls: "b32" }], { caption: "relative difference, exponent of 10 (no line: equal)", zero: false, now: p?.step ?? null }));
  parts.push(charts);
  if (t.hashes.length) parts.push(el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Hashes" }, el("table", {}, el("thead", {}, el("tr", {}, ...["step", raw.first, raw.second, ""].map(h => el("th", { scope: "col" }, h)))),
    el("tbody", {}, ...t.steps.slice(0, 50).map((s, i) => el("tr", { class: s === p?.step ? "now" : null }, el("td", { class: "number" }, s), el("td", { class: "log" }, t.hashes[0][i] ?? ""), el("td", { class: "log" }, t.hashes[1][i] ?? ""), el("td", {}, t.hashes[0][i] === t.hashes[1][i] ? "equal" : "differ")))))));
  $("shown").replaceChildren(...parts);
  if (scroll) $("tensor").scrollIntoView({ block: "nearest" });
}

function listing() {
  const format = t => t.formats[0] === t.formats[1] ? t.formats[0] : t.formats.join(" / ");
  const set = table($("tensor-table"), [
    { name: "step", value: t => t.step ?? Infinity, show: t => t.step ?? "–", number: true },
    { name: "tensor", value: t => t.tensor, show: t => el("button", { class: "link", onclick: () => show(t, true) }, t.tensor) },
    { name: "half", value: t => t.half }, { name: "kind", value: t => t.kind }, { name: "module", value: t => t.module }, { name: "source", value: t => t.source },
    { name: "format", value: format }, { name: "what", value: t => t.parting?.what ?? "" },
    { name: "first", value: t => t.parting ? +t.parting.ours : null, show: t => t.parting ? written(t.parting.ours) : "", number: true },
    { name: "second", value: t => t.parting ? +t.parting.theirs : null, show: t => t.parting ? written(t.parting.theirs) : "", number: true },
    { name: "difference", value: t => t.difference, show: t => t.parting && !raw.bitwise ? written(t.difference) : "", number: true },
    { name: "by step", value: t => most(t.apart.map(d => finite(d) ?? 0), 0), show: t => spark(t.apart.map(finite), COLOURS[t.half]) },
  ], tensors, { mark: t => t.parting !== null });
  $("rule").textContent = raw.bitwise ? "Different: another hash of the values." : `Different: values or largest magnitudes differ by more than ${raw.tolerance} of the first run's, or shares that over- or underflow by more than 0.01. What comes later may differ only because of what came before it.`;
  const box = $("search");
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = tensors.filter(t => words.every(w => [t.tensor, t.kind, t.half, t.module, t.source, ...t.formats].some(text => text.toLowerCase().includes(w))));
    set(rows);
    $("found").textContent = words.length ? `${count(rows.length)} of ${count(tensors.length)} tensors` : "";
    if (words.length && rows.length) show(rows[0], false);
  });
  box.addEventListener("keydown", event => { if (event.key === "Escape") { box.value = ""; box.dispatchEvent(new Event("input")); } });
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !["INPUT", "TEXTAREA"].includes(document.activeElement.tagName)) { event.preventDefault(); box.focus(); }
  });
}

verdict();
listing();
if (tensors.length) show(tensors[0], false);
