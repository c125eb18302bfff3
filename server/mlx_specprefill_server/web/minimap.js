// The whole text as a column of bars beside it: how well each part scored, and whether it was read.

export class Minimap {
  /** `list`: the scrolled text; `go`: called with a share of it to scroll to. */
  constructor(canvas, list, go) {
    this.canvas = canvas;
    this.list = list;
    this.chunks = this.states = [];
    const drag = (event) => go(Math.max(0, Math.min(0.9999, event.offsetY / canvas.clientHeight)));
    canvas.addEventListener("pointerdown", drag);
    canvas.addEventListener("pointermove", (event) => event.buttons && drag(event));
    list.addEventListener("scroll", () => this.later(), { passive: true });
    new ResizeObserver(() => this.later()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  set(chunks, states) {
    this.chunks = chunks;
    this.states = states;
    this.redraw();
  }

  redraw() {
    this.bars = null;
    this.later();
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#draw();
    });
  }

  /** The bars are drawn once per size and text; what is in view is drawn over them. */
  #draw() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (!width || !height || !this.chunks.length) return;
    if (!this.bars || canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      this.bars = this.#drawBars(width, height);
    }
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.drawImage(this.bars, 0, 0);
    const { scrollTop, clientHeight, scrollHeight } = this.list;
    context.fillStyle = getComputedStyle(canvas).getPropertyValue("--window");
    context.fillRect(0, (scrollTop / scrollHeight) * height, width, Math.max(2, (clientHeight / scrollHeight) * height));
  }

  /** One bar per chunk, or per row of pixels: then the best chunk of the row stands for it. */
  #drawBars(width, height) {
    const bars = Object.assign(document.createElement("canvas"), { width, height });
    const context = bars.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const colours = Object.fromEntries(["kept", "always", "dropped"].map((s) => [s, style.getPropertyValue(`--${s}`)]));
    const total = this.chunks.length;
    const rows = Math.min(height, total);
    for (let row = 0; row < rows; row += 1) {
      const first = Math.floor((row * total) / rows);
      const end = Math.max(first + 1, Math.floor(((row + 1) * total) / rows));
      const best = this.#best(first, end);
      const long = width * (0.12 + 0.88 * (1 - (this.chunks[best].rank - 1) / total) ** 2);
      context.fillStyle = colours[this.states[best]];
      const top = Math.round((row * height) / rows);
      const bottom = Math.round(((row + 1) * height) / rows);
      context.fillRect(0, top, long, Math.max(1, bottom - top - (bottom - top > 3 ? 1 : 0)));
    }
    return bars;
  }

  #best(first, end) {
    let best = first;
    for (let index = first + 1; index < end; index += 1) {
      const better = Number(this.states[index] !== "dropped") - Number(this.states[best] !== "dropped");
      if (better > 0 || (better === 0 && this.chunks[index].rank < this.chunks[best].rank)) best = index;
    }
    return best;
  }
}
