// The graph: draws what is in sight, pans, zooms, selects.
const canvas = $("canvas"), scene = svg("g"), open = new Set();
canvas.append(svg("defs", {}, svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, svg("path", { class: "arrow", d: "M0,0L8,4L0,8z" }))), scene);
const OPEN_ALL_UP_TO = 250, MARGIN = 0.6, FAR = 0.42, TINY = 0.16, NEAREST = 3, FURTHEST = 0.02, NEAR_GROUPS = 8, MANY = 1500;
let columns = 1, plane = null, view = { x: 0, y: 0, k: 1 }, drawn = null, selected = null, hits = new Set(), asked = false;

const reach = new Map();  // group -> groups its values are read in, forward
for (const node of nodes) for (const reader of node.to) {
  if (node.group === reader.group || node.backward || reader.backward) continue;
  if (!reach.has(node.group)) reach.set(node.group, new Set());
  reach.get(node.group).add(reader.group);
}
const follows = i => raw.grouping === "execution" || (reach.get(i)?.has(i + 1) ?? false);

const size = () => ({ w: canvas.clientWidth || 600, h: canvas.clientHeight || 400 });
function place() {
  plane = layoutAll(open, columns, size().w / size().h);
}
function arrange() {
  place();
  drawn = null;
  draw();
}

function spotOf(thing) {  // rectangle of a group or of a node; of a node in a closed group, its group's
  const isNode = thing.group !== undefined, box = plane.boxes[isNode ? thing.group : thing.id];
  if (!isNode || !box.open) return box;
  const { x, y } = layoutGroup(box.group).spot.get(thing);
  return { x: box.x + x, y: box.y + y, w: NODE.w, h: NODE.h };
}

function inSight(r, area) {
  return r.x < area.x1 && r.x + r.w > area.x0 && r.y < area.y1 && r.y + r.h > area.y0;
}

function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; paint(); });
}

function paint() {
  const { w, h } = size(), { x, y, k } = view;
  scene.setAttribute("transform", `scale(${k}) translate(${-x},${-y})`);
  scene.setAttribute("class", k < FAR ? "far" : "");
  const sight = { x0: x, y0: y, x1: x + w / k, y1: y + h / k };
  const covered = drawn && drawn.far === k < FAR && drawn.tiny === k < TINY && drawn.x0 <= sight.x0 && drawn.y0 <= sight.y0 && drawn.x1 >= sight.x1 && drawn.y1 >= sight.y1 && drawn.k < 3 * k;
  if (covered) return;
  const mx = MARGIN * w / k, my = MARGIN * h / k;
  drawn = { x0: sight.x0 - mx, y0: sight.y0 - my, x1: sight.x1 + mx, y1: sight.y1 + my, k, far: k < FAR, tiny: k < TINY };
  const boxes = plane.boxes.filter(box => inSight(box, drawn));
  drawn.many = boxes.reduce((sum, box) => sum + (box.open ? box.group.nodes.length : 0), 0) > MANY;
  scene.replaceChildren(...together(chainEdges()), ...together(skipEdges()), ...boxes.map(groupPicture), ...selectedEdges());
}

function together(edges) {  // where arrows are too small to see: one line for all
  const all = [...edges];
  if (!drawn.tiny || !all.length) return all;
  return [path(all.map(edge => edge.getAttribute("d")).join(""), all[0].getAttribute("class").replace("edge ", ""), false)];
}
const path = (d, cls, tip = true) => svg("path", { class: `edge ${cls}`, d, "marker-end": tip ? "url(#tip)" : null });
function* chainEdges() {
  for (let i = 0; i + 1 < plane.boxes.length; i++) {
    const a = plane.boxes[i], b = plane.boxes[i + 1];
    if (!follows(i)) continue;
    if (!inSight({ x: Math.min(a.x, b.x), y: a.y, w: Math.abs(a.x - b.x) + b.w, h: b.y + b.h - a.y }, drawn)) continue;
    if (a.y === b.y) { yield path(`M${a.x + a.w},${a.y + BOX.h / 2}H${b.x}`, ""); continue; }
    const middle = b.y - BOX.gapY / 2;
    yield path(`M${a.x + BOX.w / 2},${a.y + a.h}V${middle}H${b.x + BOX.w / 2}V${b.y}`, "");
  }
}
function curve(a, b) {
  const x0 = a.x + a.w / 2, x1 = b.x + b.w / 2;
  if (a.y === b.y && a.h === b.h) return `M${x0},${a.y}C${x0},${a.y - 34} ${x1},${b.y - 34} ${x1},${b.y}`;
  const [y0, y1] = a.y < b.y ? [a.y + a.h, b.y] : [a.y, b.y + b.h], bend = Math.max(30, Math.abs(y1 - y0) / 2) * Math.sign(y1 - y0 || 1);
  return `M${x0},${y0}C${x0},${y0 + bend} ${x1},${y1 - bend} ${x1},${y1}`;
}
function* skipEdges() {  // residual connections; what every group reads is drawn for the selected one only
  for (const [from, readers] of reach) for (const to of readers) {
    if (to - from === 1 || Math.abs(to - from) > NEAR_GROUPS) continue;  // back only where regions follow the data
    const a = plane.boxes[from], b = plane.boxes[to];
    if (inSight(a, drawn) || inSight(b, drawn)) yield path(curve(a, b), "skip");
  }
}
function* selectedEdges() {
  if (!selected) return;
  if (selected.group === undefined) {
    for (const [from, readers] of reach) for (const to of readers) if (from === selected.id || to === selected.id) yield path(curve(plane.boxes[from], plane.boxes[to]), "lit");
    return;
  }
  for (const node of selected.from) yield path(curve(spotOf(node), spotOf(selected)), "lit");
  for (const node of selected.to) yield path(curve(spotOf(selected), spotOf(node)), "lit");
}

function groupPicture(box) {
  const { group } = box, cls = `group ${group.low ? "b8" : "b16"}${selected === group ? " selected" : ""}${hits.has(group) ? " hit" : ""}`;
  const picture = svg("g", { class: cls, "data-group": group.id, transform: `translate(${box.x},${box.y})` },
    svg("rect", { class: "box", width: box.w, height: box.h, rx: drawn.tiny ? null : 5 }));
  if (drawn.tiny) {  // nobody could read it
    picture.append(svg("title", {}, `group ${group.id}: ${group.low ? "low" : "high"}, ${group.module}`));
    if (!box.open) return picture;
  } else picture.append(
    svg("text", { class: "title", x: 10, y: 18 }, `group ${group.id}`),
    svg("text", { x: BOX.w - 10, y: 18, "text-anchor": "end" }, group.low ? "low" : "high"),
    svg("text", { class: "small", x: 10, y: 34 }, cut(group.module, 27)),
    svg("text", { class: "small", x: 10, y: 48 }, `${short(group.elements)} elements, ${group.nodes.length} nodes`));
  let x = 10;
  for (const cls of ["b8", "b16", "b32", "b0"]) {
    const share = (group.parts[cls] ?? 0) / Math.max(group.elements, 1) * (BOX.w - 20);
    if (share > 0) picture.append(svg("rect", { class: `part ${cls}`, x, y: 55, width: share, height: 8 }));
    x += share;
  }
  if (box.open) {
    const near = [...layoutGroup(group).spot].filter(([, p]) => inSight({ x: box.x + p.x, y: box.y + p.y, w: NODE.w, h: NODE.h }, drawn));
    picture.append(...nodeEdges(box), ...(drawn.far ? farNodes(near) : near.map(nodePicture)));
  }
  return picture;
}
function* farNodes(near) {  // from afar: one shape for each colour, and whatever is marked
  for (const cls of ["b8", "b16", "b32", "b0"]) {
    const outline = near.filter(([node]) => node.cls === cls).map(([, p]) => `M${p.x},${p.y}h${NODE.w}v${NODE.h}h${-NODE.w}z`).join("");
    if (outline) yield svg("path", { class: `many ${cls}`, d: outline });
  }
  for (const spot of near) if (spot[0] === selected || hits.has(spot[0])) yield nodePicture(spot);
}
function* nodeEdges(box) {
  const { spot } = layoutGroup(box.group);
  if (drawn.far && drawn.many) return;
  for (const [node, p] of spot) for (const reader of node.to) {
    const q = spot.get(reader);
    if (!q || !inSight({ x: box.x + Math.min(p.x, q.x), y: box.y + Math.min(p.y, q.y), w: Math.abs(p.x - q.x) + NODE.w, h: Math.abs(p.y - q.y) + NODE.h }, drawn)) continue;
    yield path(curve({ ...p, w: NODE.w, h: NODE.h }, { ...q, w: NODE.w, h: NODE.h }), node.backward === reader.backward ? "" : "across");
  }
}
function nodePicture([node, p]) {
  const cls = `node ${node.cls}${node.saved ? " saved" : ""}${selected === node ? " selected" : ""}${hits.has(node) ? " hit" : ""}`;
  const format = node.sites.length ? node.sites[0].format : "";
  return svg("g", { class: cls, "data-node": node.id, transform: `translate(${p.x},${p.y})` },
    svg("rect", { width: NODE.w, height: NODE.h, rx: 4 }),
    svg("text", { x: 7, y: 15 }, cut(node.name, format ? 16 : 23)),
    svg("text", { class: "op", x: NODE.w - 7, y: 15, "text-anchor": "end" }, format),
    svg("text", { class: "op", x: 7, y: 29 }, cut(node.op.replace(/^aten\./, ""), 26)));
}

function select(thing, { reveal = true } = {}) {
  selected = thing;
  if (thing?.group !== undefined && reveal && !open.has(thing.group)) {
    open.add(thing.group);
    place();
  }
  drawn = null;
  if (thing && reveal) bringIntoSight(spotOf(thing));
  showDetail(thing);
  draw();
}
function bringIntoSight(r) {
  const { w, h } = size(), pad = 30;
  if (view.k < FAR && r.h === NODE.h) zoomTo(0.8, r);
  const { x, y, k } = view, inside = r.x >= x && r.y >= y && r.x + r.w <= x + w / k && r.y + r.h <= y + h / k;
  if (inside) return;
  const axis = (at, length, from, span) => length + 2 * pad > span || at < from || at + length > from + span ? at - Math.max(pad, (span - length) / 2) : from;
  view = { k, x: axis(r.x, r.w, x, w / k), y: axis(r.y, Math.min(r.h, h / k), y, h / k) };
}
function zoomTo(k, r) {
  const { w, h } = size();
  view = { k, x: r.x + r.w / 2 - w / k / 2, y: r.y + r.h / 2 - h / k / 2 };
}
function zoom(factor, px = size().w / 2, py = size().h / 2) {
  const k = Math.min(NEAREST, Math.max(FURTHEST, view.k * factor));
  view = { k, x: view.x + px / view.k - px / k, y: view.y + py / view.k - py / k };
  draw();
}
function fit() {
  const { w, h } = size(), pad = 20, k = Math.min(1.2, Math.max(FURTHEST, Math.min(w / (plane.w + 2 * pad), h / (plane.h + 2 * pad))));
  view = { k, x: -Math.max(pad, (w / k - plane.w) / 2), y: -Math.max(pad, (h / k - plane.h) / 2) };
  draw();
}
function toggle(group, wanted = !open.has(group.id)) {
  if (wanted) open.add(group.id); else open.delete(group.id);
  place();
  if (!wanted && selected?.group === group.id) selected = group;
  select(selected ?? group);
}

// The nearest thing of the same kind in a direction; steps sideways cost more than steps ahead.
function neighbour(thing, dx, dy) {
  const from = spotOf(thing), isNode = thing.group !== undefined, list = isNode ? groups[thing.group].nodes : groups;
  let best = null, least = Infinity;
  for (const other of list) {
    const r = spotOf(other), x = r.x + r.w / 2 - from.x - from.w / 2, y = r.y + r.h / 2 - from.y - from.h / 2;
    const ahead = dx * x + dy * y, aside = Math.abs(dy * x) + Math.abs(dx * y);
    if (other === thing || ahead < 1) continue;
    if (ahead + 3 * aside < least) { least = ahead + 3 * aside; best = other; }
  }
  return best ?? (isNode ? null : groups[thing.id + (dx + dy > 0 ? 1 : -1)] ?? null);
}
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isNode = selected?.group !== undefined;
  if (ARROWS[event.key]) select(selected ? neighbour(selected, ...ARROWS[event.key]) ?? selected : groups[0]);
  else if (event.key === "Enter" && selected && !isNode) {
    if (selected.nodes.length) select(selected.nodes[0]); else toggle(selected, true);
  } else if (event.key === "Escape" && isNode) select(groups[selected.group]);
  else if (event.key === "Escape" && selected && open.has(selected.id)) toggle(selected, false);
  else if (event.key === "+" || event.key === "=") zoom(1.3);
  else if (event.key === "-") zoom(1 / 1.3);
  else if (event.key === "0") fit();
  else return;
  event.preventDefault();
}

function thingAt(event) {
  const edge = canvas.getBoundingClientRect(), x = view.x + (event.clientX - edge.left) / view.k, y = view.y + (event.clientY - edge.top) / view.k;
  const within = r => x >= r.x && x <= r.x + r.w && y >= r.y && y <= r.y + r.h;
  const box = plane.boxes.find(within);
  return box && ((box.open && box.group.nodes.find(node => within(spotOf(node)))) || box.group);
}

function listen() {
  let grip = null, moved = 0;
  canvas.addEventListener("pointerdown", event => { grip = { x: event.clientX, y: event.clientY }; moved = 0; });
  canvas.addEventListener("pointermove", event => {
    if (!grip || !event.buttons) return;
    const dx = event.clientX - grip.x, dy = event.clientY - grip.y;
    moved += Math.abs(dx) + Math.abs(dy);
    if (moved > 4 && !canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
    view = { ...view, x: view.x - dx / view.k, y: view.y - dy / view.k };
    grip = { x: event.clientX, y: event.clientY };
    draw();
  });
  canvas.addEventListener("pointerup", () => { grip = null; });
  canvas.addEventListener("click", event => {
    if (moved > 4) return;
    canvas.focus({ preventScroll: true });
    const found = thingAt(event);
    if (found && found === selected && found.group === undefined && !open.has(found.id)) toggle(found, true);
    else if (found) select(found, { reveal: false });
  });
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 500), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  canvas.addEventListener("keydown", onKey);
  $("zoom-in").addEventListener("click", () => zoom(1.3));
  $("zoom-out").addEventListener("click", () => zoom(1 / 1.3));
  $("fit").addEventListener("click", fit);
  $("expand").addEventListener("click", () => { for (const group of groups) open.add(group.id); arrange(); fit(); });
  $("collapse").addEventListener("click", () => { open.clear(); if (selected?.group !== undefined) selected = groups[selected.group]; arrange(); fit(); });
  new ResizeObserver(() => { drawn = null; draw(); }).observe(canvas);
}
