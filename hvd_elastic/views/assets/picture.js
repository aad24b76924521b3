"use strict";
// Saves a plot as a picture: PNG of what is drawn, or SVG of its lines for papers.
(() => {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const escaped = (text) =>
    String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
  const short = (value) => Number(value.toFixed(2));

  function path(u, values, scale, stepped) {
    const xs = u.data[0], { min, max } = u.scales.x;
    let words = "", open = false, lastY = 0;
    for (let i = 0; i < xs.length; i++) {
      if (values[i] == null) { open = false; continue; }
      // One point beyond each end, so that the line reaches the edge; the clip cuts it.
      if ((xs[i + 1] ?? xs[i]) < min || (xs[i - 1] ?? xs[i]) > max) continue;
      const x = short(u.valToPos(xs[i], "x")), y = short(u.valToPos(values[i], scale));
      words += open ? (stepped ? `H${x}V${y}` : `L${x} ${y}`) : `M${x} ${y}`;
      [open, lastY] = [true, y];
    }
    if (stepped && open) words += `H${short(u.over.clientWidth)}V${lastY}`;
    return words;
  }

  function svg(u, chart, marks) {
    const width = u.width, left = u.over.offsetLeft, top = u.over.offsetTop + 24, height = u.height + 24;
    const [w, h] = [u.over.clientWidth, u.over.clientHeight];
    const text = (x, y, words, more = "") =>
      `<text x="${short(x)}" y="${short(y)}" fill="${color("muted")}" ${more}>${escaped(words)}</text>`;
    const grid = [], labels = [];
    u.axes.forEach((axis, side) => {
      (axis._splits ?? []).forEach((split, k) => {
        const words = (axis._values ?? [])[k];
        if (split == null) return;
        const at = side === 0 ? left + u.valToPos(split, "x") : top + u.valToPos(split, "y");
        if (side === 0) {
          grid.push(`M${short(at)} ${top}V${top + h}`);
          labels.push(text(at, top + h + 17, words ?? "", 'text-anchor="middle"'));
        } else if (at >= top - 1 && at <= top + h + 1) {
          grid.push(`M${left} ${short(at)}H${left + w}`);
          labels.push(text(left - 8, at + 4, words ?? "", 'text-anchor="end"'));
        }
      });
    });
    const stroke = color(chart.color);
    const bands = chart.low ? 2 : 0;
    const lines = [`<path d="${path(u, u.data[1], "y", chart.stepped)}" stroke="${stroke}" stroke-width="2"/>`];
    (chart.more ?? []).forEach((each, k) => {
      const dash = each.solid ? "" : ' stroke-dasharray="6 4"';
      lines.push(`<path d="${path(u, u.data[2 + bands + k], "y")}" stroke="${color(each.color)}" stroke-width="1.5"${dash}/>`);
    });
    const means = u.data.slice(2 + bands + (chart.more ?? []).length);
    const areLong = means.some((mean) => mean.some((value) => value != null));
    if (areLong) lines.forEach((line, k) => { lines[k] = line.replace(/stroke-width="[0-9.]+"/, 'stroke-width="1" opacity="0.35"'); });
    means.forEach((mean, k) => {
      lines.push(`<path d="${path(u, mean, "y")}" stroke="${color((k ? chart.more[k - 1] : chart).color)}" stroke-width="2"/>`);
    });
    const shown = marks.filter((mark) => mark.line && mark.at_s >= u.scales.x.min && mark.at_s <= u.scales.x.max);
    const rules = shown.map((mark) => `<path d="M${short(u.valToPos(mark.at_s, "x"))} 0V${h}" stroke="${color(mark.way)}" stroke-dasharray="4 3" opacity="0.75"/>`);
    const title = chart.unit ? `${chart.title} [${chart.unit}]` : chart.title;
    const keys = (chart.more ?? []).some((each) => each.name)
      ? [[chart.line, chart.color], ...chart.more.map((each) => [each.name, each.color])] : [];
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="system-ui, Arial, sans-serif" font-size="12">
<title>${escaped(title)}</title><rect width="100%" height="100%" fill="${color("card")}"/>
<text x="${left}" y="18" font-size="14" font-weight="600" fill="${color("text")}">${escaped(title)}</text>
${keys.map(([name, shade], k) => `<text x="${width - 14}" y="${18 + 15 * k}" text-anchor="end" fill="${color(shade)}">${escaped(name)}</text>`).join("")}
<path d="${grid.join("")}" stroke="${color("grid")}"/>${labels.join("")}
<clipPath id="area"><rect width="${w}" height="${h}"/></clipPath>
<g transform="translate(${left} ${top})" fill="none" clip-path="url(#area)">${rules.join("")}${lines.join("")}</g>
</svg>\n`;
  }

  function png(u) {
    const picture = document.createElement("canvas");
    [picture.width, picture.height] = [u.ctx.canvas.width, u.ctx.canvas.height];
    const to = picture.getContext("2d");
    to.fillStyle = color("card");
    to.fillRect(0, 0, picture.width, picture.height);
    to.drawImage(u.ctx.canvas, 0, 0);
    return new Promise((done) => { picture.toBlob(done); });
  }

  window.savePicture = async (u, chart, marks, kind) => {
    const blob = kind === "svg" ? new Blob([svg(u, chart, marks)], { type: "image/svg+xml" }) : await png(u);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${chart.name}.${kind}`;
    link.click();
    URL.revokeObjectURL(link.href);
  };
})();
