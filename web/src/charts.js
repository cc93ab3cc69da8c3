/** Lines over time, drawn by uPlot in the colours of the theme. */

import uPlot from "uplot";
import { seriesOf } from "./chart_data.js";
import { exact, rate } from "./format.js";
import { html, useEffect, useRef } from "./html.js";
import { colour, onTheme } from "./theme.js";
import { airflowZone } from "./zone.js";

const perSecond = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const SPARK = { width: 88, height: 24 };

/**
 * Draw a chart, redraw it when the theme changes, and update its data.
 *
 * @param {(element: HTMLElement) => uPlot.Options} options
 * @param {any} data
 */
function useChart(options, data) {
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {uPlot | null} */ (null));
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const parent = /** @type {HTMLElement} */ (element.current);
    const draw = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options(parent), latest.current, parent);
    };
    draw();
    const unsubscribe = onTheme(draw);
    const resized = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      const drawn = chart.current;
      if (width && drawn && drawn.width !== width) drawn.setSize({ width, height: drawn.height });
    });
    resized.observe(parent);
    return () => {
      unsubscribe();
      resized.disconnect();
      chart.current?.destroy();
    };
  }, []);
  useEffect(() => chart.current?.setData(data), [data]);
  return element;
}

/** @returns {any} */
const spark = () => ({
  ...SPARK,
  legend: { show: false },
  cursor: { show: false },
  axes: [{ show: false }, { show: false }],
  scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(1, high)] } },
  padding: [2, 0, 2, 0],
  series: [{}, { stroke: colour("--line"), fill: colour("--line-fill"), width: 1.5, points: { show: false } }],
});

/** A line without axes. @param {{values: (number | null)[], what: string}} props oldest first; `null` is a gap */
export function Sparkline({ values, what }) {
  const shown = values.length > 1 ? values : [values[0] ?? 0, values[0] ?? 0];
  const element = useChart(spark, [shown.map((_, index) => index), shown]);
  const known = values.filter((value) => value != null);
  const label = known.length
    ? `${what}, last hour: from ${exact(known[0])} to ${exact(known.at(-1))}, at most ${exact(Math.max(...known))}`
    : `${what}: no data yet`;
  return html`<span class="spark" ref=${element} role="img" aria-label=${label} title=${label}></span>`;
}

/** @returns {number[]} the positions of samples without neighbours */
const isolated = (values) =>
  [...values.keys()].filter((at) => values[at] != null && values[at - 1] == null && values[at + 1] == null);

/** @returns {(element: HTMLElement) => any} */
const trend = (lines, asRate, height, span) => (element) => {
  const show = (value) => (asRate ? rate(value) : exact(value));
  const axis = { stroke: colour("--fg-muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
  const tick = (value) => (asRate ? `${perSecond.format(value)}/s` : value % 1 ? "" : exact(value));
  const zone = airflowZone();
  const font = "11px system-ui, sans-serif";
  return {
    width: Math.floor(element.clientWidth) || 300,
    height,
    padding: [8, 8, 0, 0],
    cursor: { y: false, points: { size: 6 } },
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), zone),
    scales: { x: { range: () => span.current }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [
      { ...axis, font, size: 28, grid: { show: false }, space: 70, values: "{HH}:{mm}" },
      { ...axis, font, size: 52, values: (_, splits) => splits.map(tick) },
    ],
    series: [
      { value: "{HH}:{mm}:{ss}", label: "Time" },
      ...lines.map((line) => ({
        label: line.label,
        stroke: colour(line.colour),
        width: 1.75,
        dash: line.dash,
        spanGaps: false,
        paths: line.stepped ? uPlot.paths.stepped?.({ align: 1 }) : undefined,
        // A sample between two gaps would be no line at all.
        points: { show: true, filter: (plot, series) => isolated(plot.data[series]), size: 4 },
        value: (_, value) => (value == null ? "–" : show(value)),
      })),
    ],
  };
};

/**
 * Lines with axes and a legend that reads values under the pointer.
 *
 * @param {object} props
 * @param {string} props.title
 * @param {{at: string}[]} props.points oldest first
 * @param {{key: string, label: string, colour: string, dash?: number[], stepped?: boolean}[]} props.lines
 * @param {boolean} [props.asRate]
 * @param {number} [props.height]
 * @param {(number | null)[][]} [props.series] in place of the points
 * @param {[number, number]} props.span seconds, from and to: charts side by side have the same
 */
export function Trend({ title, points, lines, asRate = false, height = 180, series, span }) {
  const data = series ?? seriesOf(points, lines.map((line) => line.key));
  const shown = useRef(span);
  shown.current = span;
  const element = useChart(trend(lines, asRate, height, shown), data);
  const last = points.findLast((point) => lines.some((line) => point[line.key] != null));
  const show = (value) => (asRate ? rate(value) : exact(value));
  const label = last ? lines.map((line) => `${line.label} ${show(last[line.key])}`).join(", ") : "no data yet";
  return html`
    <figure class="trend">
      <figcaption>${title}</figcaption>
      <div ref=${element} role="img" aria-label=${`${title}, last hour; now ${label}`}></div>
    </figure>
  `;
}
