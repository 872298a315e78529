for (const { id, data, layout, config } of figures) {
  Plotly.newPlot(id, data, layout, config);
}
// Paper is narrower than a screen, and two figures fit on a sheet.
const resize = (size) => figures.forEach(({ id, layout }) => Plotly.relayout(id, size ?? { autosize: true, width: null, height: layout.height }));
addEventListener("beforeprint", () => resize({ width: 660, height: 310 }));
addEventListener("afterprint", () => resize(null));
