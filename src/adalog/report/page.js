"use strict";
// The tables are complete without this script. It sorts and filters them, and links them to the picture of the model.
const rows = JSON.parse(document.getElementById("data").textContent);
const table = document.getElementById("sites"), body = table.tBodies[0];
const lines = [...body.rows], cells = [...document.querySelectorAll(".cell")];
const hover = document.getElementById("hover");
const numberOf = (element) => Number(element.getAttribute("href").replace(/^#\w+-/, ""));

// --- sort: each heading becomes a button; rows without a value always come last ---
for (const heading of table.tHead.rows[0].cells) {
  const button = document.createElement("button"), key = heading.dataset.key;
  button.type = "button";
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => {
      const [x, y] = [rows[a.dataset.i][key] ?? null, rows[b.dataset.i][key] ?? null];
      if (x === null || y === null) return (x === null) - (y === null);
      const less = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return (down ? -less : less) || a.dataset.i - b.dataset.i;
    };
    body.append(...lines.slice().sort(order));
  });
}

// --- filter ---
const text = document.getElementById("filter"), role = document.getElementById("role");
const differs = document.getElementById("differs");
for (const name of [...new Set(rows.map((row) => row.role))].sort()) role.append(new Option(name, name));
document.querySelector(".tools").hidden = false;
function filter() {
  const wanted = text.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const line of lines) {
    const row = rows[line.dataset.i], held = line.textContent.toLowerCase();
    const good = wanted.every((word) => held.includes(word)) && (!role.value || row.role === role.value)
      && (!differs?.checked || row.differs);
    line.hidden = !good;
    shown += good;
  }
  document.getElementById("count").textContent = `${shown} of ${rows.length} sites`;
}
for (const control of [text, role, differs]) control?.addEventListener("input", filter);
filter();

// --- hover and focus: highlight a cell of the picture and its table row together ---
function light(index, on) {
  document.getElementById(`row-${index}`)?.classList.toggle("lit", on);
  for (const cell of cells) if (numberOf(cell) === index) cell.classList.toggle("lit", on);
}
for (const cell of cells) {
  const index = numberOf(cell), told = cell.querySelector("title").textContent;
  cell.querySelector("title").remove();  // otherwise the browser shows it too
  cell.setAttribute("aria-label", told);
  const show = () => {
    const row = rows[index], box = cell.getBoundingClientRect();
    hover.textContent = `${told.split(", ").join("\n")}\n${row.left ?? ""}\n${row.right ?? ""}`;
    hover.hidden = false;
    const left = Math.min(box.left, document.documentElement.clientWidth - hover.offsetWidth - 8);
    const below = box.bottom + hover.offsetHeight + 8 < window.innerHeight;
    hover.style.left = `${Math.max(left, 8)}px`;
    hover.style.top = `${below ? box.bottom + 6 : box.top - hover.offsetHeight - 6}px`;
    light(index, true);
  };
  const hide = () => { hover.hidden = true; light(index, false); };
  for (const event of ["mouseenter", "focus"]) cell.addEventListener(event, show);
  for (const event of ["mouseleave", "blur"]) cell.addEventListener(event, hide);
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hover.hidden = true; });
for (const line of lines) {
  for (const [event, on] of [["mouseenter", true], ["mouseleave", false]])
    line.addEventListener(event, () => light(Number(line.dataset.i), on));
}

// --- open the details of a site when a link leads to it ---
function follow() {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.tagName === "DETAILS") target.open = true;
  if (target?.tagName === "TR") light(Number(target.dataset.i), true);
}
addEventListener("hashchange", follow);
follow();
