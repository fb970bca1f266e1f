// What moves on the page: the value under the pointer, and runs switched on and off. The page reads without it.
(() => {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  const hide = () => { tip.style.display = "none"; };
  const show = (event, rows) => {
    tip.replaceChildren(...rows.map(([colour, words]) => {
      const row = document.createElement("div");
      if (colour !== null) {
        const mark = row.appendChild(document.createElement("i"));
        mark.className = "swatch r" + colour % 8;
      }
      row.append(words);
      return row;
    }));
    tip.style.display = "block";
    const left = event.clientX + 14, right = innerWidth - tip.offsetWidth - 8;
    const above = event.clientY - tip.offsetHeight - 10;
    tip.style.left = Math.max(8, Math.min(left, right)) + "px";
    tip.style.top = (above > 8 ? above : event.clientY + 18) + "px";
  };
  const brief = (value) => String(Number(value.toPrecision(3)));

  // The titles become tips at once, by pointer and by touch, instead of the browser's slow ones.
  for (const title of document.querySelectorAll("rect > title")) {
    title.parentNode.tip = title.textContent;
    title.remove();
  }
  for (const bars of document.querySelectorAll(".lanes .bars")) {
    const over = (event) => {
      const words = event.target.tip;
      if (!words) return hide();
      const row = [...event.target.parentNode.parentNode.children].indexOf(event.target.parentNode);
      const rank = bars.previousElementSibling.children[row].dataset.rank;
      show(event, [[null, bars.dataset.noun + " " + rank + ": " + words]]);
    };
    bars.addEventListener("pointermove", over);
    bars.addEventListener("pointerdown", over);
    bars.addEventListener("pointerleave", hide);
  }

  for (const bins of document.querySelectorAll(".bins")) {
    const over = (event) => event.target.tip ? show(event, [[null, event.target.tip]]) : hide();
    bins.addEventListener("pointermove", over);
    bins.addEventListener("pointerdown", over);
    bins.addEventListener("pointerleave", hide);
  }

  const names = [...document.querySelectorAll(".key")].map((key) => key.textContent);
  for (const plot of document.querySelectorAll(".plot")) {
    const { x0, x1, y0, y1 } = plot.dataset;
    const hair = plot.querySelector(".hair");
    const lines = [...plot.querySelectorAll("polyline")].map((line) => ({
      line, run: Number(line.dataset.run),
      points: line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
    }));
    const over = (event) => {
      const box = plot.getBoundingClientRect();
      const at = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
      hair.style.left = 100 * at + "%";
      hair.style.display = "block";
      const rows = [[null, brief(Number(x0) + at * (x1 - x0)) + " s"]];
      for (const { line, run, points } of lines) {
        if (line.classList.contains("off")) continue;
        const after = points.findIndex(([x]) => x >= 1000 * at);
        if (after < 0 || (after === 0 && points[0][0] > 1000 * at + 1)) continue;
        const [[xa, ya], [xb, yb]] = [points[Math.max(0, after - 1)], points[after]];
        const y = xb > xa ? ya + (yb - ya) * (1000 * at - xa) / (xb - xa) : yb;
        rows.push([run, names[run] + "  " + brief(Number(y0) + (1 - y / 1000) * (y1 - y0))]);
      }
      show(event, rows);
    };
    plot.addEventListener("pointermove", over);
    plot.addEventListener("pointerdown", over);
    plot.addEventListener("pointerleave", () => { hair.style.display = "none"; hide(); });
  }
  addEventListener("scroll", hide, { passive: true });

  for (const key of document.querySelectorAll(".key")) {
    key.addEventListener("click", () => {
      const on = key.getAttribute("aria-pressed") !== "true";
      key.setAttribute("aria-pressed", String(on));
      for (const mark of document.querySelectorAll('.plot [data-run="' + key.dataset.run + '"]')) {
        mark.classList.toggle("off", !on);
      }
    });
  }
})();
