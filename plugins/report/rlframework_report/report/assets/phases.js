// The time of each phase of a step: stacked over the steps of each run, and as shares of the total.
function phases() {
  const runs = data.runs.map((run, index) => ({ run, index })).filter(({ run }) => run.phases);
  if (!runs.length) return null;
  const cards = runs.map(({ run, index }) => phaseCard(run, index, paintOf));
  listeners.runs.push(() => runs.forEach(({ index }, i) => { cards[i].hidden = !state.shown[index]; }));
  return el("section", { id: "time" }, el("h2", {}, "Time of a step"), el("div", { class: "grid" }, cards));
}

function phaseCard(run, index, paint) {
  const { names, values, totals } = run.phases;
  const sum = totals.reduce((a, b) => a + b, 0) || 1;
  const share = el("div", { class: "share", "aria-hidden": "true" }, names.map((name, n) => {
    const part = el("i", { class: paint(name), title: name });
    part.style.flex = `${totals[n] / sum} 0 0`;
    return part;
  }));
  const cells = names.map(() => el("td", { class: "n" }));
  const head = el("th", { class: "n" });
  const rows = names.map((name, n) => el("tr", {}, el("td", {}, el("span", { class: `sw ${paint(name)}` }), name), cells[n],
    el("td", { class: "n" }, `${(100 * totals[n] / sum).toFixed(1)}%`), el("td", { class: "n" }, seconds(totals[n]))));
  const show = (i) => {
    const steps = run.phases;
    head.textContent = i === null ? "mean per step" : steps.from[i] === steps.to[i] ? `step ${steps.from[i]}` : `steps ${steps.from[i]}–${steps.to[i]}`;
    values.forEach((list, n) => { cells[n].textContent = seconds(i === null ? meanOf(run.phases, n) : list[i]); });
  };
  show(null);
  const alone = data.runs.length === 1;
  const plot = phasePlot(run, paint, show, innerWidth < 760 ? [330, 180] : alone ? [720, 230] : [400, 190]);
  const table = el("table", { class: "phases" }, el("thead", {}, el("tr", {}, el("th", {}, "phase"), head, el("th", { class: "n" }, "share"), el("th", { class: "n" }, "total"))), el("tbody", {}, rows));
  const title = el("h4", {}, data.runs.length > 1 ? runName(index) : run.name);
  return el("article", { class: `card chart${alone ? " wide alone" : ""}` }, el("header", {}, title), plot, el("div", { class: "scroll" }, share, table));
}

function meanOf({ from, to, values }, n) {
  const weights = from.map((first, i) => to[i] - first + 1);
  return values[n].reduce((sum, value, i) => sum + value * weights[i], 0) / weights.reduce((a, b) => a + b, 0);
}

function phasePlot(run, paint, show, [width, height]) {
  const { names, values, from, to } = run.phases;
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Seconds of each phase over the steps of ${run.name}; the table below shows the means` });
  const sums = from.map((_, i) => values.reduce((sum, list) => sum + list[i], 0));
  const sorted = [...sums].sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
  const top = (sorted.at(-1) > 3 * usual ? 1.3 * usual : sorted.at(-1)) * 1.05 || 1;
  const [x0, x1] = [from[0] - 0.5, to.at(-1) + 0.5];
  const { left, right, bottom } = MARGIN;
  const x = (step) => left + (step - x0) / (x1 - x0) * (width - left - right);
  const y = (value) => height - bottom - Math.min(value / top, 1) * (height - bottom - MARGIN.top);
  const label = (at, level, words, anchor) => { const text = svg("text", { x: at, y: level, "text-anchor": anchor }); text.textContent = words; plot.append(text); };
  for (const mark of ticks(0, top, 4)) {
    plot.append(svg("line", { class: "gridline", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    label(left - 7, y(mark) + 4, `${Number(mark.toPrecision(6))} s`, "end");
  }
  const under = from.map(() => 0);
  names.forEach((name, n) => {
    let [upper, lower] = ["", ""];
    from.forEach((first, i) => {
      const [a, b] = [x(first - 0.5).toFixed(1), x(to[i] + 0.5).toFixed(1)];
      const floor = y(under[i]).toFixed(1);
      under[i] += values[n][i];
      upper += `${i ? "L" : "M"}${a},${y(under[i]).toFixed(1)}H${b}`;
      lower = `L${b},${floor}H${a}${lower}`;
    });
    plot.append(svg("path", { class: `phase ${paint(name)}`, d: `${upper}${lower}Z` }));
  });
  for (const mark of ticks(x0, x1, 5, true)) label(x(mark), height - bottom + 15, mark.toLocaleString("en"), "middle");
  const cross = svg("line", { class: "cross", y1: MARGIN.top, y2: height - bottom, visibility: "hidden" });
  plot.append(cross);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const step = x0 + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (x1 - x0);
    const i = Math.max(0, indexBefore(from, Math.round(step)));
    const at = x((from[i] + to[i]) / 2);
    cross.setAttribute("x1", at); cross.setAttribute("x2", at); cross.setAttribute("visibility", "visible");
    show(i);
  });
  plot.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); show(null); });
  return plot;
}
