const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const soft = "var(--soft)", ink = { labelColor: "currentColor", titleColor: "currentColor" };
const text = { ...ink, titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12 };
const config = { // colours are the page's own
  background: null, font: "system-ui, 'DejaVu Sans', sans-serif", view: { stroke: null },
  title: { color: "currentColor", anchor: "start" }, mark: { color: "var(--s0)" },
  range: { category: [0, 1, 2, 3, 4, 5, 6].map((i) => `var(--s${i})`) },
  axis: { ...text, titlePadding: 8, labelOverlap: "greedy", labelSeparation: 4, domainColor: soft,
    tickColor: soft, gridColor: "var(--line)" }, axisX: { labelAngle: 0 },
  legend: { ...text, orient: "bottom", columns: 8, symbolStrokeWidth: 2, labelLimit: 400,
    titleLimit: 400 } };
// ast: expressions are interpreted, the page's policy allows no code from texts
const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, config };

// --- a change in a figure's form: what does not fit the choices hides, charts hear of it ---
const views = new Map();
async function embed(box) {
  const spec = JSON.parse(box.textContent);
  const { view } = await vegaEmbed(box, spec, options);
  return { view, names: (spec.params ?? []).map((param) => param.name) };
}
async function update(figure) {
  const form = figure.querySelector(".menus");
  const chosen = form ? Object.fromEntries(new FormData(form)) : {};
  for (const item of all("[data-policy]", figure))
    item.hidden = Object.entries(item.dataset).some(([key, v]) => chosen[key] && chosen[key] !== v);
  if ("wipe" in chosen) figure.style.setProperty("--wipe", `${chosen.wipe}%`);
  for (const box of all(".chart", figure).filter((each) => !each.closest("[hidden]"))) {
    if (!views.has(box)) views.set(box, embed(box));
    const { view, names } = await views.get(box);
    for (const name of names) if (name in chosen) view.signal(name, chosen[name]);
    await view.runAsync();
  }
}

// --- a pointer on a picture moves the line of all ---
function drag(event) {
  if (event.type === "pointermove" && !event.buttons) return;
  const box = event.currentTarget.getBoundingClientRect();
  const slider = event.currentTarget.closest("figure").querySelector("[name=wipe]");
  slider.value = 100 * (event.clientX - box.left) / box.width;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}

// --- a click on a heading sorts by its numbers or words; empty cells stay last ---
function sort(event) {
  const heading = event.currentTarget.parentNode, body = heading.closest("table").tBodies[0];
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const value = ({ cells: { [heading.cellIndex]: cell } }) =>
    cell && !cell.matches(".note") ? cell.textContent.replace(/^inf$/, "Infinity") : "";
  const order = (a, b) => (a === "" || b === "" ? (a === "") - (b === "")
    : sign * (parseFloat(a) - parseFloat(b) || a.localeCompare(b)));
  all("th", heading.parentNode).forEach((each) => each.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
}

all("th button").forEach((button) => button.addEventListener("click", sort));
for (const frame of all(".wipe"))
  for (const type of ["pointerdown", "pointermove"]) frame.addEventListener(type, drag);
const figures = all("figure");
for (const figure of figures) {
  figure.addEventListener("input", () => update(figure));
  figure.addEventListener("submit", (event) => event.preventDefault());
}
Promise.all(figures.map(update)).then(() => { document.documentElement.dataset.ready = "1"; });
