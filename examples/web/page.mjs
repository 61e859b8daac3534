// The page: it hands files to the worker and shows what comes back. Text from packs and files is never read as HTML.
import { isPack } from "./files.mjs";

const element = (id) => document.getElementById(id);
const worker = new Worker("worker.mjs", { type: "module" });

function show(file) {
  element("error").textContent = "";
  worker.postMessage(file);
}

worker.onmessage = ({ data }) => {
  if (data.model !== undefined) element("model").textContent = data.model;
  if (data.error !== undefined) element("error").textContent = data.error;
  element("classes").hidden = !data.classes;
  if (!data.classes) return;
  element("time").textContent = `${data.milliseconds.toFixed(1)} ms`;
  const rows = data.classes.map(({ name, probability }) => {
    const row = document.createElement("tr");
    for (const text of [name, `${(100 * probability).toFixed(1)} %`]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  element("classes").tBodies[0].replaceChildren(...rows);
};
worker.onerror = () => (element("error").textContent = "The worker does not start: serve this folder over HTTP.");

async function take(file) {
  if (!file) return;
  if (!(await isPack(file))) {
    URL.revokeObjectURL(element("picture").src);
    element("picture").src = URL.createObjectURL(file);
    element("picture").hidden = false;
  }
  show(file);
}

element("file").onchange = (event) => take(event.target.files[0]);
document.ondragover = (event) => {
  event.preventDefault();
  document.body.classList.add("over");
};
document.ondragleave = () => document.body.classList.remove("over");
document.ondrop = (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  take(event.dataTransfer.files[0]);
};
