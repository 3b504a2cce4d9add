"""Style sheet and script of the page, as text: the page has no other files."""

CSS = """
:root { color-scheme: light dark;
  --back: #ffffff; --panel: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --line: #d5d9de;
  --accent: #0059b3; --warn: #8a4b00;
  --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #b8568f; --s4: #b57a00; --s5: #3a9bd9;
  --s6: #6b6b6b; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171b; --panel: #1d2127; --ink: #e8eaed; --soft: #a3acb6; --line: #39404a;
  --accent: #7ab8ff; --warn: #ffb766;
  --s0: #4aa8e0; --s1: #ff8a3d; --s2: #2cc79c; --s3: #e39cc4; --s4: #f0b429; --s5: #9bd3f5;
  --s6: #b0b0b0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main, header, footer { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 0 0 .3rem; }
section { margin: 0 0 2.2rem; padding-top: 1.6rem; border-top: 1px solid var(--line); }
p { margin: .3rem 0 .8rem; max-width: 78ch; }
nav ol { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .8rem 0 1.6rem; padding: 0;
  list-style: none; }
a { color: var(--accent); }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem;
  margin: .8rem 0; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: .8rem 0 0; }
figcaption { color: var(--soft); font-size: .88rem; max-width: 82ch; margin-top: .6rem; }
.missing { background: var(--panel); border-left: 4px solid var(--warn); padding: .6rem .9rem;
  overflow-wrap: anywhere; }
code { font: .9em ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
.scroll, .wide { overflow-x: auto; max-width: 100%; }
.scroll:focus-visible, .wide:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .45rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child, td.note { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--back); }
td.note { white-space: normal; color: var(--soft); font-size: .82rem; line-height: 1.35; }
td.note span { display: block; max-width: min(50rem, 58vw); }
tbody tr:hover td { background: var(--panel); }
th { vertical-align: bottom; border-bottom: 2px solid var(--line); }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.controls { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: end;
  background: var(--panel); padding: .7rem .9rem; border-radius: 8px; margin: .6rem 0; }
.controls label { display: grid; gap: .15rem; font-size: .85rem; color: var(--soft);
  min-width: 0; max-width: 100%; }
.controls label.slider { flex: 1 1 260px; }
select { font: inherit; color: var(--ink); background: var(--back); border: 1px solid var(--line);
  border-radius: 6px; padding: .35rem .5rem; max-width: 100%; }
input[type=range] { width: 100%; accent-color: var(--accent); height: 1.9rem; }
.tiles { display: grid; gap: 14px; margin-top: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
.tiles.one { grid-template-columns: minmax(0, 420px); }
.tile { min-width: 0; font-size: .85rem; }
.tile b { display: block; overflow-wrap: anywhere; }
.tile .numbers { color: var(--soft); line-height: 1.35; }
.wipe { position: relative; aspect-ratio: 1; overflow: hidden; border-radius: 6px;
  background: var(--panel); touch-action: pan-y; cursor: ew-resize; }
.wipe img { position: absolute; inset: 0; width: 100%; height: 100%; object-fit: contain;
  user-select: none; pointer-events: none; }
.wipe.small img { image-rendering: pixelated; }
.wipe .over { clip-path: inset(0 0 0 var(--wipe)); }
.wipe .bar-line { position: absolute; top: 0; bottom: 0; left: var(--wipe); width: 2px;
  margin-left: -1px; background: #fff; box-shadow: 0 0 0 1px rgb(0 0 0 / .55); }
.wipe .absent { position: absolute; inset: 0; display: grid; place-items: center; padding: .5rem;
  text-align: center; color: var(--soft); font-size: .8rem; overflow: auto; }
.panels { display: grid; gap: 12px 18px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.panels.two { grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.panels > * { min-width: 0; }
.absent-note:empty { display: none; }
.panels.small { display: flex; flex-wrap: wrap; }
svg { display: block; } .panels svg { max-width: 100%; height: auto; }
.panels.two > svg { width: 100%; }
.panels.small svg { flex: none; }
svg text { fill: var(--ink); font: 12px system-ui, "DejaVu Sans", sans-serif; }
svg text.title { font-weight: 600; font-size: 13px; }
svg text.label { fill: var(--soft); }
svg text.note { font-size: 12px; paint-order: stroke; stroke: var(--back); stroke-width: 3px; }
.axis { fill: none; stroke: var(--soft); } .grid { fill: none; stroke: var(--line); }
.border { fill: none; stroke: var(--back); stroke-width: 1.5; }
.border.strong { stroke: #ff5a36; stroke-width: 1; stroke-dasharray: 3 2; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.mark { stroke: var(--back); stroke-width: 1; }
.cells { image-rendering: pixelated; }
.line.mean { stroke: var(--ink); stroke-width: 3.5; }
.line.used { stroke: var(--s0); } .line.live { stroke: var(--s1); }
.rule { fill: none; stroke: var(--ink); stroke-dasharray: 7 4; stroke-width: 1.5; }
.rule.pool { stroke: var(--s2); stroke-dasharray: 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem .5rem; margin-top: .5rem; font-size: .88rem; }
.entry { display: inline-flex; align-items: center; gap: .4rem; border: 1px solid transparent;
  padding: .15rem .45rem; border-radius: 6px; background: none; color: inherit; font: inherit;
  overflow-wrap: anywhere; text-align: left; }
button.entry { cursor: pointer; border-color: var(--line); }
button.entry[aria-pressed=true] { background: var(--panel); border-color: var(--accent); }
.key { flex: none; }
.dim .series { opacity: .13; } .dim .series.chosen { opacity: 1; }
.bar { display: flex; flex-wrap: wrap; gap: .3rem .8rem; align-items: start; margin-top: .6rem;
  font-size: .85rem; }
.bar img { display: block; width: 220px; height: 12px; }
.bar .ends { display: flex; justify-content: space-between; width: 220px; }
.swatch { display: inline-flex; align-items: center; gap: .3rem; }
.swatch i { width: 14px; height: 14px; border-radius: 3px; outline: 1px solid var(--line); }
[hidden] { display: none !important; }
@media (max-width: 520px) {
  main, header, footer { padding: 0 14px; } h1 { font-size: 1.4rem; }
  dl.facts { grid-template-columns: 1fr; } dl.facts dt { margin-top: .3rem; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
  .tiles.one { grid-template-columns: 1fr; }
  th:first-child, td:first-child { min-width: 7.5rem; max-width: 9.5rem; white-space: normal;
    overflow-wrap: break-word; }
}
@media print { .controls, nav { display: none; } }
""" + "".join(
    f".c{i} {{ stroke: var(--s{i}); }} .f{i} {{ fill: var(--s{i}); }}\n" for i in range(7)
)

SCRIPT = r"""
"use strict";
const root = document.documentElement;
let errors = 0;
root.dataset.errors = "0";
addEventListener("error", () => { root.dataset.errors = String(++errors); });
addEventListener("unhandledrejection", () => { root.dataset.errors = String(++errors); });

const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const make = (tag, attributes = {}, text = "") => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
};

// --- table: a click on a heading sorts; empty cells stay last ---
function sortTable(table, column, heading) {
  const down = heading.getAttribute("aria-sort") === "ascending";
  all("th", table).forEach((other) => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.cells[column]?.dataset.value ?? "";
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return down ? -order : order;
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
}
for (const table of all("table.sortable")) {
  all("th", table).forEach((heading, column) => {
    heading.querySelector("button")?.addEventListener("click",
      () => sortTable(table, column, heading));
  });
}

// --- legend: bring one series to the front ---
for (const button of all("[data-highlight]")) {
  button.addEventListener("click", () => {
    const figure = button.closest("figure"), number = button.dataset.highlight;
    const on = button.getAttribute("aria-pressed") !== "true";
    all("[data-highlight]", figure).forEach((b) => b.setAttribute("aria-pressed", "false"));
    button.setAttribute("aria-pressed", String(on));
    figure.classList.toggle("dim", on);
    all(".series", figure).forEach((g) => {
      const chosen = on && g.dataset.series === number;
      g.classList.toggle("chosen", chosen);
      if (chosen) g.parentNode.append(g);
    });
  });
}

// --- pickers: selects whose joined values name the variant that is shown ---
for (const picker of all("[data-picker]")) {
  const selects = all("select", picker), variants = all("[data-key]", picker);
  const show = () => {
    const key = selects.map((select) => select.value).join("|");
    let found = false;
    variants.forEach((v) => { v.hidden = v.dataset.key !== key; found ||= !v.hidden; });
    picker.querySelector("[data-otherwise]")?.toggleAttribute("hidden", found);
  };
  selects.forEach((select) => select.addEventListener("change", show));
  show();
}

// --- pictures: every policy beside the others, wiped over the full cache ---
function startViewer(viewer) {
  const data = JSON.parse(document.getElementById("picture-data").textContent);
  const [image, budget, policy] = ["image", "budget", "policy"].map(
    (name) => viewer.querySelector(`select[name=${name}]`));
  const slider = viewer.querySelector("input[type=range]");
  const tiles = viewer.querySelector(".tiles"), note = viewer.querySelector(".absent-note");

  const wipe = () => tiles.style.setProperty("--wipe", `${slider.value}%`);
  const drag = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = event.currentTarget.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    slider.value = String(Math.round(100 * Math.min(1, Math.max(0, part))));
    wipe();
  };

  function tile(row, i) {
    const box = make("div", { class: "tile" });
    const frame = make("div", { class: data.small ? "wipe small" : "wipe" });
    const name = `${data.names[i]}, ${row.label}`;
    if (row.images) {
      frame.append(make("img", { src: data.full[i], alt: `${data.names[i]}, full cache` }));
      frame.append(make("img", { src: row.images[i], class: "over", alt: name }));
      frame.append(make("div", { class: "bar-line" }));
      frame.addEventListener("pointerdown", drag);
      frame.addEventListener("pointermove", drag);
    } else {
      frame.append(make("div", { class: "absent" }, row.reason));
    }
    box.append(frame, make("b", {}, row.label));
    if (row.images) box.append(make("span", { class: "numbers" }, row.numbers[i]));
    return box;
  }

  function show() {
    const i = Number(image.value);
    const rows = data.rows.filter((row) =>
      (row.budget === null || String(row.budget) === budget.value)
      && (policy.value === "" || row.label === policy.value));
    tiles.classList.toggle("one", policy.value !== "");
    const shown = rows.filter((row) => row.images || policy.value !== "");
    const absent = rows.filter((row) => !shown.includes(row)).map((row) => row.label);
    tiles.replaceChildren(...shown.map((row) => tile(row, i)));
    note.textContent = absent.length ? `Not run at this budget: ${absent.join(", ")}.` : "";
    wipe();
  }
  [image, budget, policy].forEach((select) => select.addEventListener("change", show));
  slider.addEventListener("input", wipe);
  show();
}
all(".viewer").forEach(startViewer);
root.dataset.ready = "1";
"""
