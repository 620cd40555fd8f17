"use strict";
// Behaviour of report pages: tables that sort, pictures that enlarge, values of curves at the pointer.
// Without it the page shows the same content.

function addSorting(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (head.classList.contains("bar")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      // numbers begin with the largest, names with A
      const rows = [...table.tBodies[0].rows];
      const values = rows.map((row) => cellValue(row.cells[column]));
      const known = values.filter((value) => value !== null);
      const numeric = known.length > 0 && known.every((value) => typeof value === "number");
      const before = head.getAttribute("aria-sort");
      const ascending = before === null ? !numeric : before === "descending";
      const order = rows.map((row, index) => index).sort((a, b) => {
        if (values[a] === null || values[b] === null) return (values[a] === null) - (values[b] === null);
        const [one, other] = ascending ? [a, b] : [b, a];
        return numeric
          ? values[one] - values[other]
          : String(values[one]).localeCompare(String(values[other]), "en", { numeric: true });
      });
      table.tBodies[0].append(...order.map((index) => rows[index]));
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    });
  });
}

function cellValue(cell) {
  // the text without a second line; null for a dash, a number where the text begins with one
  const first = cell.querySelector("small") ? cell.firstChild : cell;
  const text = first.textContent.trim();
  if (text === "" || text === "\u2014") return null;
  if (cell.tagName === "TH") return text;
  const number = Number(text.replaceAll(",", "").replace("%", "").replace("\u2212", "-").replace("<", ""));
  return Number.isNaN(number) ? text : number;
}

function addEnlarging(images) {
  if (!images.length) return;
  const dialog = document.createElement("dialog");
  const close = document.createElement("button");
  const large = document.createElement("img");
  close.type = "button";
  close.textContent = "Close";
  dialog.append(close, large);
  document.body.append(dialog);
  dialog.addEventListener("click", () => dialog.close());
  for (const image of images) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "enlarge";
    button.title = "Enlarge";
    image.replaceWith(button);
    button.append(image);
    button.addEventListener("click", () => {
      large.src = image.src;
      large.alt = image.alt;
      dialog.setAttribute("aria-label", image.alt);
      dialog.showModal();
    });
  }
}

function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - values[low] <= values[high] - wanted ? low : high;
}

function svgElement(svg, name, attributes) {
  const element = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

class Chart {
  constructor(figure) {
    this.data = JSON.parse(figure.dataset.chart);
    this.svg = figure.querySelector("svg");
    this.place = figure.querySelector("figcaption span");
    this.values = [...figure.querySelectorAll(".legend b")];
    this.resting = this.values.map((value) => value.textContent);
    const area = this.svg.querySelector(".area");
    this.area = Object.fromEntries(["x", "y", "width", "height"].map((key) => [key, Number(area.getAttribute(key))]));
    const bottom = this.area.y + this.area.height;
    this.cursor = svgElement(this.svg, "path", { class: "cursor", d: `M0 ${this.area.y}V${bottom}`, visibility: "hidden" });
    this.dots = [...figure.querySelectorAll(".legend li")].map((item) =>
      svgElement(this.svg, "circle", { class: `dot ${item.className}`, r: 3.5, visibility: "hidden" }));
    this.svg.append(this.cursor, ...this.dots);
  }

  valueAt(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) * this.svg.viewBox.baseVal.width) / box.width;
    const share = Math.min(1, Math.max(0, (x - this.area.x) / this.area.width));
    return this.data.x[0] + share * (this.data.x[1] - this.data.x[0]);
  }

  show(value) {
    const [left, right] = this.data.x;
    const x = this.area.x + (this.area.width * (value - left)) / (right - left);
    this.cursor.setAttribute("transform", `translate(${x} 0)`);
    this.cursor.setAttribute("visibility", "visible");
    this.place.textContent = `${this.data.label} ${Number(value.toPrecision(3))}`;
    this.data.lines.forEach(([xs, ys], index) => {
      const at = nearest(xs, value);
      this.values[index].textContent = String(Number(ys[at].toPrecision(4)));
      const dot = this.dots[index];
      dot.setAttribute("cx", this.area.x + (this.area.width * (xs[at] - left)) / (right - left));
      dot.setAttribute("cy", this.area.y + this.area.height * (1 - this.heightOf(ys[at])));
      dot.setAttribute("visibility", "visible");
    });
  }

  heightOf(value) {
    let [low, high] = this.data.y;
    if (this.data.log) [low, high, value] = [low, high, Math.max(value, 1e-100)].map(Math.log);
    return Math.min(1.03, Math.max(-0.03, (value - low) / (high - low)));
  }

  hide() {
    for (const element of [this.cursor, ...this.dots]) element.setAttribute("visibility", "hidden");
    this.place.textContent = "";
    this.values.forEach((value, index) => { value.textContent = this.resting[index]; });
  }
}

function addPointer(figures) {
  const charts = figures.map((figure) => new Chart(figure));
  for (const chart of charts) {
    const linked = charts.filter((other) => other === chart || (other.data.label === chart.data.label &&
      String(other.data.x) === String(chart.data.x)));
    const show = (value) => linked.forEach((other) => other.show(value));
    let at = chart.data.x[1];
    chart.svg.addEventListener("pointermove", (event) => show((at = chart.valueAt(event))));
    chart.svg.addEventListener("pointerleave", () => linked.forEach((other) => other.hide()));
    chart.svg.addEventListener("blur", () => linked.forEach((other) => other.hide()));
    chart.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const [low, high] = chart.data.x;
      show((at = Math.min(high, Math.max(low, at + (step * (high - low)) / 50))));
    });
  }
}

document.querySelectorAll("table").forEach((table) => {
  if (table.tHead && table.tBodies[0]?.rows.length > 1) addSorting(table);
});
addEnlarging([...document.querySelectorAll("figure > img")]);
document.querySelectorAll(".charts").forEach((group) => addPointer([...group.querySelectorAll(".chart")]));
