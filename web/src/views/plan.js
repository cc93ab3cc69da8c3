/** How a redrive brings letters back, in words. */

import { counted, duration, percent, rate } from "../format.js";

/** What people read of a redrive's request; a field that has no words is shown by its name. @type {Record<string, [string, (value: any) => any]>} */
const PLAN = {
  protocol: ["Way", (value) => ({ copy: "each letter becomes a new job", in_place: "the stored jobs are delivered again" })[value] ?? value],
  rate: ["At most", (value) => rate(value)],
  waves: ["Waves", (value) => [value].flat().map((size) => (size === "rest" ? "the rest" : size)).join(", then ")],
  stop_when: ["Stops", (value) => stopsWhen(value)],
  max_redrives: ["Parked after", (value) => counted(value, "redrive")],
  order_key: ["In order of", String],
  count_under_pause: ["Counted", () => "while the consumers were paused"],
};

/** @param {any} rule */
function stopsWhen(rule) {
  const share = typeof rule === "number" ? rule : rule?.died_again;
  if (share == null) return null;
  const within = rule?.within ? `, decided within ${typeof rule.within === "number" ? duration(rule.within) : rule.within}` : "";
  return `where more than ${percent(share)} died again${within}`;
}

/** @param {Record<string, any>} plan @returns {[string, any][]} */
export const planOf = (plan) =>
  Object.entries(plan)
    .filter(([, value]) => value != null && value !== false)
    .map(([name, value]) => {
      const [label, words] = PLAN[name] ?? [name.replaceAll("_", " "), asWords];
      return [label, words(value)];
    });

/** @param {any} value @returns {string} without the signs of JSON */
function asWords(value) {
  if (value === true) return "yes";
  if (Array.isArray(value)) return value.map(asWords).join(", ");
  if (value && typeof value === "object") {
    return Object.entries(value).filter(([, item]) => item != null).map(([name, item]) => `${name.replaceAll("_", " ")} ${asWords(item)}`).join(", ");
  }
  return String(value);
}
