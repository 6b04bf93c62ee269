// Tensors on request: the latest of each, its elements by exponent, and how the share that underflows went.
function histogramOf(d) {
  const ends = d.range ? `; dashed: smallest and largest number of ${d.format}${d.scale ? ` with scale 2^${d.scale}` : ""}` : "";
  const at = d.at.length ? `; first that underflow: ${d.at.join(", ")}` : "";
  return histogram(d.exponents, d.range, `${d.tensor} (${d.kind}) at step ${d.step}: elements by exponent, ${count(d.zeros)} zeros${ends}${at}`);
}
function dumpedTensors() {
  const place = $("dumped");
  if (!raw.dumped.length) { place.remove(); document.querySelector('nav a[href="#dumped"]').remove(); return; }
  const into = el("table", { id: "dumped-table" }), shown = el("div", { id: "histogram", "aria-live": "polite" });
  place.append(shown, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Dumped tensors" }, into));
  const show = d => shown.replaceChildren(histogramOf(d)), share = (d, n) => n / Math.max(d.elements, 1);
  table(into, [
    { name: "tensor", value: d => d.tensor, show: d => el("button", { class: "link", onclick: () => show(d) }, d.tensor) },
    { name: "kind", value: d => d.kind }, { name: "module", value: d => d.module }, { name: "step", value: d => d.step, number: true },
    { name: "format", value: d => d.format, show: d => d.stored ? d.format : `${d.format}, were it stored` },
    { name: "elements", value: d => d.elements, show: d => count(d.elements), number: true },
    { name: "zeros", value: d => share(d, d.zeros), show: d => percent(share(d, d.zeros)), number: true },
    { name: "underflow", value: d => share(d, d.underflow), show: d => percent(share(d, d.underflow)), number: true },
    { name: "", value: d => share(d, d.underflow), show: d => spark(d.series, "b8") },
    { name: "overflow", value: d => share(d, d.overflow), show: d => percent(share(d, d.overflow)), number: true },
    { name: "largest", value: d => +d.amax, show: d => plain(+d.amax), number: true },
    { name: "file", value: d => d.file ?? "", show: d => d.file ?? "hash alone" },
  ], raw.dumped);
  show(raw.dumped[0]);
}
