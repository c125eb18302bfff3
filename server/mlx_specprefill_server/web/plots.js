// Small plots of the last minutes: one number each, drawn as the numbers come.

import { element } from "./format.js";
import { word } from "./glossary.js";

const KEPT = 300; // values
const WIDTH = 300;
const HEIGHT = 60;
const SPACE = "http://www.w3.org/2000/svg";

export class Plot {
  /** `read`: the number of a statistics object; `write`: a number for people. */
  constructor(title, read, write) {
    this.read = read;
    this.write = write;
    this.values = [];
    this.now = element("dd", { className: "figure" });
    this.range = element("dd", { className: "faint figure" });
    this.line = document.createElementNS(SPACE, "polyline");
    this.area = document.createElementNS(SPACE, "polygon");
    this.picture = document.createElementNS(SPACE, "svg");
    this.picture.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.picture.setAttribute("preserveAspectRatio", "none");
    this.picture.setAttribute("aria-hidden", "true");
    this.picture.append(this.area, this.line);
    this.element = element("div", { className: "plot" }, element("dt", {}, word(title)), this.now,
      element("dd", {}, this.picture), this.range);
  }

  add(stats) {
    this.values.push(this.read(stats));
    if (this.values.length > KEPT) this.values.shift();
    const most = Math.max(...this.values);
    const scale = most > 0 ? (HEIGHT - 3) / most : 0;
    const left = WIDTH - this.values.length + 1;
    const points = this.values.map((value, index) => `${left + index},${(HEIGHT - 1 - value * scale).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${left},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`);
    this.now.textContent = this.write(this.values.at(-1));
    this.range.textContent = `most: ${this.write(most)}`;
  }
}
