// Menus, table and plot of the leaderboard. Texts are set as text, never as markup.
const { rows, scores, better } = JSON.parse(document.getElementById("data").textContent);
const round = (digits) => (v) => (v == null ? "" : Number(v.toPrecision(digits)).toString());
const bytes = (v) => {
  let i = 0;
  for (; v >= 1024 && i < 4; i++) v /= 1024;
  return `${Number(v.toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][i]}`;
};
const columns = [
  ["group", "group"], ["policy", "policy"], ["budget", "budget", round(4)],
  ["fraction", "KV of full", (v) => `${(100 * v).toFixed(1)}%`], ["bytes", "KV per image", bytes],
  ...Object.entries(scores).map(([key, name]) => [key, name, round(4)]),
  ["speed", "pictures/s", round(3)], ["device", "device"], ["cache", "cache"],
  ["versions", "versions"], ["run", "run"],
];
const state = { group: rows[0].group, policy: "", device: "", text: "", score: Object.keys(scores)[0],
  sort: "fraction", down: false };
const element = (tag, text, parent) => {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  parent?.append(made);
  return made;
};
const values = (name) => [...new Set(rows.map((row) => row[name]))];

function menu(name, title, options, all) {
  const label = element("label", title, document.getElementById("menus"));
  const select = element("select", null, label);
  select.name = name;
  if (all) element("option", all, select).value = "";
  for (const [value, text] of options) element("option", text, select).value = value;
  select.value = state[name];
  select.onchange = () => { state[name] = select.value; draw(); };
}
const same = (list) => list.map((value) => [value, value]);
menu("group", "group", same(values("group")), "all groups");
menu("policy", "policy", same(values("policy")), "all policies");
menu("device", "device", same(values("device")), "all devices");
menu("score", "score", Object.entries(scores));
const search = element("input", null, element("label", "text", document.getElementById("menus")));
search.type = "search";
search.name = "text";
search.oninput = () => { state.text = search.value.toLowerCase(); draw(); };

const head = document.getElementById("head");
for (const [key, name] of columns) {
  const cell = element("th", null, head), button = element("button", name, cell);
  cell.scope = "col";
  button.type = "button";
  button.onclick = () => {
    state.down = state.sort === key ? !state.down : better[key] === "higher";
    state.sort = key;
    draw();
  };
}

function draw() {
  const shown = rows.filter((row) =>
    ["group", "policy", "device"].every((name) => !state[name] || row[name] === state[name]) &&
    (!state.text || Object.values(row).join(" ").toLowerCase().includes(state.text)));
  const sign = state.down ? -1 : 1;
  shown.sort((a, b) => {
    const [x, y] = [a[state.sort], b[state.sort]];
    if (x == null || y == null) return (x == null) - (y == null);
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
  [...head.children].forEach((cell, i) => {
    const mine = columns[i][0] === state.sort;
    mine ? cell.setAttribute("aria-sort", state.down ? "descending" : "ascending")
      : cell.removeAttribute("aria-sort");
  });
  const body = document.getElementById("body");
  body.replaceChildren();
  for (const row of shown) {
    const line = element("tr", null, body);
    for (const [key, , show] of columns) element("td", show ? show(row[key]) : row[key], line);
  }
  document.getElementById("count").textContent = `${shown.length} of ${rows.length} rows`;
  plot(shown);
}

// Round numbers, at most seven, from at most `low` to at least `high`.
function round_steps(low, high) {
  const span = high - low || Math.abs(high) || 1, power = 10 ** Math.floor(Math.log10(span / 5));
  const step = power * [1, 2, 5, 10].find((m) => span / (m * power) <= 5);
  const first = Math.floor(low / step + 1e-9), last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, i) => +((first + i) * step).toPrecision(12));
}

function plot(shown) {
  const space = "http://www.w3.org/2000/svg", key = document.getElementById("key");
  const svg = document.createElementNS(space, "svg"), [w, h, l, b] = [900, 340, 70, 40];
  const add = (tag, set, text) => {
    const made = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(set)) made.setAttribute(name, value);
    if (text != null) made.textContent = text;
    svg.append(made);
    return made;
  };
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${scores[state.score]} over bytes`);
  const points = shown.filter((row) => row[state.score] != null);
  document.getElementById("plot").replaceChildren(svg);
  key.replaceChildren();
  if (!points.length) { add("text", { x: 20, y: 30 }, "no rows with this score"); return; }
  const rising = round_steps(...[Math.min, Math.max].map((f) => f(...points.map((p) => p[state.score]))));
  const across = round_steps(0, Math.max(...points.map((p) => p.fraction)));
  const [lowest, highest, most] = [rising[0], rising.at(-1), across.at(-1)];
  const x = (v) => l + (v / most) * (w - l - 20), y = (v) => h - b - ((v - lowest) / (highest - lowest)) * (h - b - 20);
  for (const v of rising) {
    add("line", { x1: l, x2: w - 20, y1: y(v), y2: y(v), class: "axis" });
    add("text", { x: l - 8, y: y(v) + 4, "text-anchor": "end" }, round(4)(v));
  }
  for (const f of across)
    add("text", { x: x(f), y: h - b + 18, "text-anchor": "middle" }, `${+(100 * f).toFixed(1)}%`);
  add("text", { x: w - 20, y: h - 4, "text-anchor": "end" }, "bytes of the full cache");
  add("text", { x: l, y: 12 }, scores[state.score]);
  const lines = [...new Set(points.map((p) => `${p.group}\t${p.policy}\t${p.device}`))];
  lines.forEach((line, i) => {
    const [group, policy, device] = line.split("\t"), colour = `var(--s${i % 7})`;
    const mine = points.filter((p) => p.group === group && p.policy === policy && p.device === device)
      .sort((p, q) => p.fraction - q.fraction);
    const dash = { stroke: colour, "stroke-dasharray": i < 7 ? "none" : `${2 + Math.floor(i / 7) * 3} 3` };
    add("path", { d: mine.map((p, j) => `${j ? "L" : "M"}${x(p.fraction)} ${y(p[state.score])}`).join(""), ...dash });
    for (const p of mine) {
      const dot = add("circle", { cx: x(p.fraction), cy: y(p[state.score]), r: 4 });
      dot.style.fill = i < 7 ? colour : "var(--back)";
      dot.style.stroke = colour;
      const title = document.createElementNS(space, "title");
      title.textContent = `${p.policy} at ${round(4)(p.budget)}: ${round(4)(p[state.score])}`;
      dot.append(title);
    }
    const names = [policy, ...(state.group ? [] : [group]), ...(values("device").length > 1 ? [device] : [])];
    element("span", `${i < 7 ? "●" : "○"} ${names.join(", ")}`, key).style.color = colour;
  });
}
draw();
