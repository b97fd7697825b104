// The section of curves: one chart per quantity, drawn when it scrolls into view.
function curves() {
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((each) => each.node === entry.target);
      chart.visible = entry.isIntersecting;
      if (chart.visible && chart.stale) chart.draw();
    }
  }, { rootMargin: "400px" });
  const parts = data.groups.map((group) => {
    const grid = el("div", { class: "grid" });
    for (const spec of group.charts) {
      const chart = new Chart(spec);
      charts.push(chart);
      grid.append(chart.node);
      seen.observe(chart.node);
    }
    return [el("h3", { id: `curves-${group.key}` }, group.title), group.charts.length ? grid : null, constants(group)];
  });
  listeners.draw.push(() => charts.forEach((chart) => chart.draw()));
  listeners.hover.push(() => charts.forEach((chart) => chart.visible && chart.drawHover()));
  let before = 0;
  new ResizeObserver(() => {
    const width = document.documentElement.clientWidth;
    if (width !== before) { before = width; notify("draw"); }
  }).observe(document.documentElement);
  addEventListener("beforeprint", () => charts.forEach((chart) => { chart.visible = true; chart.draw(); }));
  return el("section", { id: "curves" }, el("h2", {}, "Curves"), howToRead(), parts.flat());
}

function howToRead() {
  const sample = (cls, mark) => svg("svg", { width: 30, height: 12, viewBox: "0 0 30 12" }, svg("path", { class: cls, d: "M1,6H29" }), ...(mark ? [svg("path", { class: mark, d: shapePath("circle", 15, 6, 3.2) })] : []));
  const key = (cls, mark, words) => el("span", { class: "small-key c0" }, sample(cls, mark), words);
  const any = Object.values(data.splits).includes("validation");
  return el("p", { class: "note how" }, key("raw", null, "as measured"), key("smooth", null, "smoothed"), any ? key("held", "mark", "held out") : null,
    el("span", {}, "Hover over a curve for its values; drag to zoom, double-click to reset."));
}

function constants(group) {
  if (!group.constant.length && !group.same.length) return null;
  const words = group.constant.flatMap(([title, value], i) => [i ? " · " : "", `${title} `, el("b", {}, number(value))]);
  const same = group.same.map(([title, other]) => el("span", {}, `${title}: same values as ${other}. `));
  return el("p", { class: "constants" }, ...same, ...(words.length ? ["Constant: ", ...words] : []));
}
