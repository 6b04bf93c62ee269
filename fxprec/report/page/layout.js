// Where groups and nodes stand. Groups flow in rows like words; in an open group the forward half runs down on the left
// and the backward half up on the right.
const BOX = { w: 172, h: 74, gapX: 34, gapY: 40 };
const NODE = { w: 168, h: 36, gapX: 16, gapY: 18, head: 66, pad: 16, halves: 70 };
const inside = new Map();

// Rows of nodes: the longest path within the half; what has no source there stands just above its first reader.
function depths(list) {
  const here = new Set(list), depth = new Map();
  for (const node of list) {  // in execution order
    let deepest = -1;
    for (const source of node.from) if (here.has(source)) deepest = Math.max(deepest, depth.get(source));
    depth.set(node, deepest + 1);
  }
  for (const node of list.toReversed()) {
    if (node.from.some(source => here.has(source))) continue;
    const readers = node.to.filter(reader => here.has(reader)).map(reader => depth.get(reader));
    if (readers.length) depth.set(node, Math.max(0, readers.reduce((a, b) => Math.min(a, b)) - 1));
  }
  return depth;
}

function layoutHalf(list, upwards) {
  const MOST = 5, depth = depths(list), rows = new Map();
  for (const node of list) {
    const d = depth.get(node);
    if (!rows.has(d)) rows.set(d, []);
    rows.get(d).push(node);
  }
  const lines = [...rows.keys()].sort((a, b) => a - b).flatMap(d => {
    const row = rows.get(d), pieces = [];
    for (let i = 0; i < row.length; i += MOST) pieces.push(row.slice(i, i + MOST));
    return pieces;
  });
  const columns = lines.reduce((most, line) => Math.max(most, line.length), 0), spot = new Map();
  const slot = NODE.w + NODE.gapX, full = columns * slot - NODE.gapX;
  lines.forEach((line, i) => {
    const place = node => {
      const known = node.from.map(source => spot.get(source)?.x).filter(x => x !== undefined);
      return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 0;
    };
    const ordered = line.map((node, j) => [place(node), j, node]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const start = (full - (line.length * slot - NODE.gapX)) / 2;
    const y = (upwards ? lines.length - 1 - i : i) * (NODE.h + NODE.gapY);
    ordered.forEach(([, , node], j) => spot.set(node, { x: start + j * slot, y }));
  });
  return { w: Math.max(full, 0), h: Math.max(lines.length * (NODE.h + NODE.gapY) - NODE.gapY, 0), spot };
}

function layoutGroup(group) {
  if (!inside.has(group)) {
    const forward = layoutHalf(group.nodes.filter(n => !n.backward), false), backward = layoutHalf(group.nodes.filter(n => n.backward), true);
    const between = forward.w && backward.w ? NODE.halves : 0, h = Math.max(forward.h, backward.h), spot = new Map();
    for (const [node, p] of forward.spot) spot.set(node, { x: NODE.pad + p.x, y: NODE.head + p.y });
    for (const [node, p] of backward.spot) spot.set(node, { x: NODE.pad + forward.w + between + p.x, y: NODE.head + h - backward.h + p.y });
    inside.set(group, { w: Math.max(2 * NODE.pad + forward.w + between + backward.w, BOX.w), h: NODE.head + h + NODE.pad, spot });
  }
  return inside.get(group);
}

// Returns the box of each group, in order, and the whole size. Rows are as long as makes the whole fit `aspect`.
function layoutAll(open, columns, aspect) {
  const sizes = groups.map(group => open.has(group.id) ? layoutGroup(group) : BOX);
  const area = sizes.reduce((sum, size) => sum + (size.w + BOX.gapX) * (size.h + BOX.gapY), 0);
  const longest = Math.max(columns * (BOX.w + BOX.gapX), open.size ? Math.sqrt(area * aspect) : 0);
  const boxes = [];
  let x = 0, y = 0, row = 0, widest = 0;
  groups.forEach((group, i) => {
    const { w, h } = sizes[i];
    if (x && x + w > longest) { y += row + BOX.gapY; x = row = 0; }
    boxes.push({ group, open: open.has(group.id), x, y, w, h });
    row = Math.max(row, h);
    widest = Math.max(widest, x + w);
    x += w + BOX.gapX;
  });
  return { boxes, w: widest, h: y + row };
}

function columnsFor(aspect) {
  const cells = Math.sqrt(groups.length * aspect * (BOX.h + BOX.gapY) / (BOX.w + BOX.gapX));
  return Math.max(1, Math.min(20, Math.ceil(cells), groups.length));
}
