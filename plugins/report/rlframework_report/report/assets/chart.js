// A chart of all metrics of one quantity, for all visible runs.
const [HEIGHT, TALL] = [210, 400];
const MARGIN = { left: 50, right: 12, top: 8, bottom: 22 };

class Chart {
  constructor(spec) {
    Object.assign(this, { spec, log: false, wide: false, visible: false, stale: true });
    this.readout = el("div", { class: "readout" });
    this.plot = svg("svg", { class: "plot", tabindex: 0, role: "img" });
    this.logButton = this.toggle("log", "Logarithmic scale", () => { this.log = !this.log; });
    this.wideButton = this.toggle("⤢", "Larger", () => { this.wide = !this.wide; this.node.classList.toggle("wide", this.wide); });
    const heading = el("h4", { title: spec.names.join(", ") }, spec.title);
    this.node = el("article", { class: "card chart" }, el("header", {}, heading, this.logButton, this.wideButton), this.readout, this.plot);
    this.listen();
  }

  toggle(word, title, change) {
    const press = () => { change(); button.setAttribute("aria-pressed", word === "log" ? this.log : this.wide); this.draw(); };
    const button = el("button", { type: "button", title, "aria-label": `${title}: ${this.spec.title}`, "aria-pressed": "false", onclick: press }, word);
    return button;
  }

  /** Collect the series to draw, one per run and metric, with positions on the axis and smoothed values. */
  collect() {
    this.lines = [];
    data.runs.forEach((run, index) => {
      for (const name of this.spec.names) {
        const found = run.series[name];
        if (!state.shown[index] || !found || !found[1].length) continue;
        const [group, mean, low, high] = found;
        const steps = run.places[group];
        const held = data.splits[name] === "validation";
        const line = { run: index, name, held, steps, mean, low, high, x: steps.map((step) => placeOf(index, step)) };
        line.smooth = held || this.spec.planned || state.span <= 1 ? mean : smoothed(steps, mean, state.span);
        if (this.spec.intervals.includes(name) && run.series[`${name}_low`]?.[1].length) {
          const [[at, from], [, to]] = [run.series[`${name}_low`], run.series[`${name}_high`]];
          line.interval = { x: run.places[at].map((step) => placeOf(index, step)), low: from, high: to };
        }
        line.bad = (run.bad[name] ?? []).map((step) => placeOf(index, step));
        this.lines.push(line);
      }
    });
  }

  draw() {
    if (!this.visible) { this.stale = true; return; }
    this.stale = false;
    this.collect();
    this.width = Math.max(260, this.node.clientWidth - 32);
    this.height = this.wide ? TALL : HEIGHT;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.plot.replaceChildren();
    this.setRange();
    this.setLabel();
    if (!this.lines.length) {
      this.plot.append(svg("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }));
      this.plot.lastChild.textContent = "no values in the visible runs";
      this.readout.replaceChildren();
      return;
    }
    this.drawAxes();
    const clip = `clip-${charts.indexOf(this)}`;
    const inner = svg("g", { "clip-path": `url(#${clip})` });
    this.plot.append(svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left - 4, y: 0, width: this.width - MARGIN.left - MARGIN.right + 8, height: this.height - MARGIN.bottom + 4 })), inner);
    for (const line of this.lines) this.drawRaw(inner, line);
    for (const line of this.lines) this.drawLine(inner, line);
    this.overlay = svg("g");
    this.plot.append(this.overlay);
    this.drawHover();
  }

  setLabel() {
    const values = this.lines.map((line) => `${data.runs[line.run].name} ${line.name}: last ${number(line.mean.at(-1), this.spec.percent)}`);
    this.plot.setAttribute("aria-label", `${this.spec.title}. ${values.join("; ")}`);
  }

  setRange() {
    let [x0, x1] = state.zoom ?? wholeRange();
    if (!(x1 > x0)) [x0, x1] = [x0 - 1, x0 + 1];
    this.xRange = [x0, x1];
    const values = [];
    for (const line of this.lines) {
      line.x.forEach((x, i) => {
        if (x < x0 || x > x1) return;
        if (line.low && !state.robust) values.push(line.low[i], line.high[i]); else values.push(line.mean[i]);
      });
    }
    for (const { interval } of this.lines) interval?.x.forEach((x, i) => { if (x >= x0 && x <= x1) values.push(interval.low[i], interval.high[i]); });
    this.isLog = this.log && values.some((value) => value > 0);
    const usable = (this.isLog ? values.filter((value) => value > 0) : values).sort((a, b) => a - b);
    const cut = state.robust && !this.spec.planned && usable.length > 20 ? Math.ceil(usable.length * 0.005) : 0;
    let [low, high] = [usable[cut] ?? 0, usable[usable.length - 1 - cut] ?? 1];
    if (this.isLog) [low, high] = [Math.log10(low), Math.log10(high)];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
    const touches = !this.isLog && low >= 0 && low < 0.25 * high;
    this.yRange = [touches ? 0 : low - room, high + room];
    if (this.spec.percent && high <= 1) this.yRange[1] = Math.min(this.yRange[1], 1.03);
  }

  x(place) { return MARGIN.left + (place - this.xRange[0]) / (this.xRange[1] - this.xRange[0]) * (this.width - MARGIN.left - MARGIN.right); }

  y(value) {
    const at = this.isLog ? Math.log10(Math.max(value, 1e-300)) : value;
    const share = (at - this.yRange[0]) / (this.yRange[1] - this.yRange[0]);
    return this.height - MARGIN.bottom - Math.max(-2, Math.min(3, share)) * (this.height - MARGIN.top - MARGIN.bottom);
  }

  drawAxes() {
    const { left, right, bottom } = MARGIN;
    const base = this.height - bottom;
    const [y0, y1] = this.yRange;
    let marks = ticks(y0, y1, this.wide ? 8 : 4);
    if (this.isLog) marks = y1 - y0 > 1.5 ? ticks(y0, y1, 5, true) : marks;
    const step = marks.length > 1 ? marks[1] - marks[0] : 1;
    for (const mark of marks) {
      const value = this.isLog ? 10 ** mark : mark;
      const y = this.y(value);
      this.plot.append(svg("line", { class: "gridline", x1: left, x2: this.width - right, y1: y, y2: y }));
      this.text(left - 7, y + 4, this.tick(value, step), "end");
    }
    this.plot.append(svg("line", { class: "axis", x1: left, x2: this.width - right, y1: base, y2: base }));
    for (const mark of this.xTicks()) this.text(this.x(mark), base + 15, this.xText(mark), "middle");
  }

  xTicks() {
    const room = Math.max(2, Math.floor(this.width / 85));
    const [low, high] = this.xRange;
    if (state.along === "step") return ticks(low, high, room, true);
    const unit = [86400, 3600, 60, 1].find((size) => high - low >= 2 * size) ?? 1;
    return ticks(low / unit, high / unit, room).map((mark) => mark * unit);
  }

  xText(place) {
    if (state.along === "step") return Math.round(place).toLocaleString("en");
    const span = this.xRange[1] - this.xRange[0];
    const [unit, word] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => span >= 2 * size) ?? [1, "s"];
    return `${Number((place / unit).toPrecision(3))} ${word}`;
  }

  tick(value, step) {
    if (this.spec.percent) return `${Number((100 * value).toFixed(step < 0.01 ? 1 : 0))}%`;
    if (this.isLog || value === 0) return number(value);
    if (Math.abs(value) < 1e-3 || step < 1e-3) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
    if (Math.abs(value) >= 1e5) return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value);
    return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(step))) });
  }

  text(x, y, words, anchor, attributes = {}) {
    const node = svg("text", { x, y, "text-anchor": anchor, ...attributes });
    node.textContent = words;
    this.plot.append(node);
  }

  path(xs, ys) {
    let text = "";
    let pen = "M";
    for (let i = 0; i < xs.length; i++) {
      if (this.isLog && !(ys[i] > 0)) { pen = "M"; continue; }
      text += `${pen}${this.x(xs[i]).toFixed(1)},${this.y(ys[i]).toFixed(1)}`;
      pen = "L";
    }
    return text;
  }

  drawBand(group, run, { x, low, high }) {
    group.append(svg("path", { class: `band ${colour(run)}`, d: `${this.path(x, high)}${this.path([...x].reverse(), [...low].reverse()).replace("M", "L")}Z` }));
  }

  /** Draw intervals and raw values faintly behind all lines; for a thinned series, the band from minimum to maximum. */
  drawRaw(group, line) {
    if (line.interval) this.drawBand(group, line.run, line.interval);
    if (line.held || line.x.length === 1) return;
    const c = colour(line.run);
    if (line.low) this.drawBand(group, line.run, line);
    if (line.smooth !== line.mean) group.append(svg("path", { class: `raw ${c}`, d: this.path(line.x, line.mean) }));
  }

  drawLine(group, line) {
    const c = colour(line.run);
    if (line.held) {
      group.append(svg("path", { class: `held ${c}`, d: this.path(line.x, line.mean) }));
      this.drawMarks(group, line);
    } else if (line.x.length === 1) {
      group.append(svg("path", { class: `dot ${c}`, d: shapePath(shapeOf(line.run), this.x(line.x[0]), this.y(line.mean[0]), 4) }));
    } else {
      group.append(svg("path", { class: `smooth ${c}`, d: this.path(line.x, line.smooth) }));
      const last = line.smooth.at(-1);
      if (!this.isLog || last > 0) group.append(svg("path", { class: `dot ${c}`, d: shapePath(shapeOf(line.run), this.x(line.x.at(-1)), this.y(last), 3.6) }));
    }
    for (const x of line.bad) {
      const cross = svg("path", { class: "wrong", d: `M${this.x(x) - 3.5},${MARGIN.top}l7,7m0,-7l-7,7` });
      cross.append(svg("title"));
      cross.lastChild.textContent = `${data.runs[line.run].name}: not a finite number`;
      group.append(cross);
    }
  }

  /** Draw a mark on held-out values, as many as fit, always including the last. */
  drawMarks(group, line) {
    let before = Infinity;
    for (let i = line.x.length - 1; i >= 0; i--) {
      const x = this.x(line.x[i]);
      if (before - x < 13 || (this.isLog && !(line.mean[i] > 0))) continue;
      before = x;
      group.append(svg("path", { class: `mark ${colour(line.run)}`, d: shapePath(shapeOf(line.run), x, this.y(line.mean[i]), 3.2) }));
    }
  }

  /** Draw the crosshair with its position, and show the values there (without a pointer, the last values). */
  drawHover() {
    if (!this.overlay || !this.lines.length) return;
    this.overlay.replaceChildren();
    const at = state.hover === null || state.hover < this.xRange[0] || state.hover > this.xRange[1] ? null : state.hover;
    this.showValues(at);
    if (at === null) return;
    const x = this.x(at);
    const base = this.height - MARGIN.bottom;
    this.overlay.append(svg("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: base }));
    for (const line of this.lines) {
      const i = nearest(line.x, at);
      if (!line.held && line.x.length > 1 && at >= line.x[0] && at <= line.x.at(-1)) {
        this.overlay.append(svg("path", { class: `dot ${colour(line.run)}`, d: shapePath(shapeOf(line.run), this.x(line.x[i]), this.y(line.smooth[i]), 4) }));
      }
    }
    const words = state.along === "step" ? `step ${Math.round(at).toLocaleString("en")}` : this.xText(at);
    const width = 12 + 6.4 * words.length;
    const left = Math.max(0, Math.min(this.width - width, x - width / 2));
    this.overlay.append(svg("rect", { class: "pill", x: left, y: base + 3, width, height: 17, rx: 5 }));
    const text = svg("text", { class: "on-pill", x: left + width / 2, y: base + 15.5, "text-anchor": "middle" });
    text.textContent = words;
    this.overlay.append(text);
  }

  showValues(at) {
    const parts = [];
    for (const held of [false, true]) {
      const lines = this.lines.filter((line) => line.held === held).slice(0, 12);
      if (!lines.length) continue;
      const mixed = this.lines.some((line) => line.held) && this.lines.some((line) => !line.held);
      const word = mixed ? el("span", {}, held ? "held out" : "training") : null;
      parts.push(el("div", {}, word, lines.map((line) => this.valueOf(line, at))));
    }
    this.readout.replaceChildren(...parts);
  }

  valueOf(line, at) {
    const i = at === null ? line.x.length - 1 : line.held ? nearest(line.x, at) : nearest(line.x, at);
    const outside = at !== null && (at > line.x.at(-1) + 1e-9 || at < line.x[0] - 1e-9);
    const value = number(line.mean[i], this.spec.percent);
    const ends = line.low ? `, from ${number(line.low[i], this.spec.percent)} to ${number(line.high[i], this.spec.percent)}` : "";
    const title = `${data.runs[line.run].name}, ${line.name}, step ${Math.round(line.steps[i])}: ${value}${ends}; smoothed ${number(line.smooth[i], this.spec.percent)}`;
    return el("span", { class: "value", title }, runKey(line.run, line.held), outside ? "–" : value);
  }

  listen() {
    const place = (event) => {
      const box = this.plot.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * this.width;
      const share = (x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
      return this.xRange[0] + Math.max(0, Math.min(1, share)) * (this.xRange[1] - this.xRange[0]);
    };
    const hover = (at) => { state.hover = at === null ? null : state.along === "step" ? Math.round(at) : at; notify("hover"); };
    let from = null;
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) { from = place(event); this.plot.setPointerCapture(event.pointerId); }
      hover(place(event));
    });
    this.plot.addEventListener("pointermove", (event) => {
      const at = place(event);
      hover(at);
      if (from === null || !this.overlay) return;
      const [a, b] = [this.x(Math.min(from, at)), this.x(Math.max(from, at))];
      this.overlay.append(svg("rect", { class: "brush", x: a, y: MARGIN.top, width: b - a, height: this.height - MARGIN.top - MARGIN.bottom }));
    });
    this.plot.addEventListener("pointerup", (event) => {
      const at = place(event);
      if (from !== null && Math.abs(this.x(at) - this.x(from)) > 8) zoom([Math.min(from, at), Math.max(from, at)]);
      from = null;
    });
    this.plot.addEventListener("pointercancel", () => { from = null; });
    this.plot.addEventListener("pointerleave", (event) => { if (from === null && event.pointerType === "mouse") hover(null); });
    this.plot.addEventListener("dblclick", () => zoom(null));
    this.plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") zoom(null);
      if (!by || !this.lines?.length) return;
      event.preventDefault();
      const [low, high] = this.xRange;
      const stride = (event.shiftKey ? 10 : 1) * (state.along === "step" ? 1 : (high - low) / 200);
      hover(Math.max(low, Math.min(high, (state.hover ?? high) + by * stride)));
    });
    this.plot.addEventListener("blur", () => hover(null));
  }
}

const charts = [];

/** The full horizontal range of the visible runs, the same for all charts, so that they are aligned. */
function wholeRange() {
  const ends = data.runs.flatMap((run, i) => (state.shown[i] ? [run.clock[0][0], run.clock[0].at(-1)].map((step) => placeOf(i, step)) : []));
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

function zoom(range) {
  state.zoom = range;
  $("unzoom").hidden = range === null;
  notify("draw");
}
