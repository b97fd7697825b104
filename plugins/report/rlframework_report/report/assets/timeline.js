// What the trainer, each engine and refits did in the last steps of a run, one lane each.
function timeline() {
  const cards = data.runs.flatMap((run, index) => (run.timeline ? [{ index, node: timelineCard(run, index) }] : []));
  if (!cards.length) return null;
  listeners.runs.push(() => cards.forEach(({ index, node }) => { node.hidden = !state.shown[index]; }));
  return el("section", { id: "timeline" }, el("h2", {}, "Timeline"), cards.map(({ node }) => node));
}

function timelineCard(run, index) {
  const { activities, shares, hint, hidden } = run.timeline;
  const paint = (n) => paintOf(activities[n]);
  const share = new Map(shares);
  const keys = activities.map((name, n) => el("span", {}, el("span", { class: `sw ${paint(n)}` }), `${name} `, share.has(name) ? el("b", {}, number(share.get(name), true)) : null));
  const more = hidden ? el("p", { class: "note" }, `${hidden} more engines are not drawn.`) : null;
  const title = el("h4", {}, data.runs.length > 1 ? runName(index) : run.name);
  return el("article", { class: "card chart" }, el("header", {}, title), hint ? el("p", { class: "note" }, hint) : null, timelinePlot(run, paint), more, el("p", { class: "keys" }, keys));
}

function timelinePlot(run, paint) {
  const { steps, seconds: span, activities, lanes } = run.timeline;
  const [width, high, gap, top] = [innerWidth < 760 ? 330 : 720, 20, 6, 18];
  const longest = Math.max(...lanes.map(({ name }) => name.length));
  const [left, right, bottom] = [Math.max(66, 14 + 6.5 * longest), 44, 22];
  const height = top + lanes.length * (high + gap) + bottom;
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `What trainer, engines and refits of ${run.name} did in steps ${steps[0][0]} to ${steps.at(-1)[0]}` });
  const x = (at) => left + Math.min(Math.max(at / (span || 1), 0), 1) * (width - left - right);
  const label = (at, level, words, anchor) => { const text = svg("text", { x: at, y: level, "text-anchor": anchor }); text.textContent = words; plot.append(text); };
  lanes.forEach(({ name, busy, spans }, row) => {
    const y = top + row * (high + gap);
    label(left - 7, y + high / 2 + 4, name, "end");
    label(width - right + 6, y + high / 2 + 4, `${Math.round(100 * busy)}%`, "start");
    for (const [n, begun, ended] of spans) {
      const hover = svg("title");
      hover.textContent = `${name}: ${activities[n]}, ${seconds(ended - begun)}`;
      plot.append(svg("rect", { class: `phase ${paint(n)}`, x: x(begun).toFixed(2), y, width: Math.max(x(ended) - x(begun), 0.5).toFixed(2), height: high }, hover));
    }
  });
  steps.forEach(([step, at]) => {
    plot.append(svg("line", { class: "cross", x1: x(at), x2: x(at), y1: top - 4, y2: height - bottom }));
    label(x(at) + 3, top - 6, String(step), "start");
  });
  for (const mark of ticks(0, span, 5)) label(x(mark), height - bottom + 15, `${Number(mark.toPrecision(6))} s`, "middle");
  return plot;
}
