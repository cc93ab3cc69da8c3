/** Times in the zone that the user has chosen in Airflow, which stores it in the browser; else in the browser's own. */

const STORAGE_KEY = "timezone";
/** @type {Map<string, Intl.DateTimeFormat>} */
const formats = new Map();

/** @returns {string} the zone's name, such as `Europe/Berlin` */
export function airflowZone() {
  let stored;
  try {
    stored = localStorage.getItem(STORAGE_KEY);
  } catch {
    stored = null;
  }
  // Airflow stores JSON.
  const name = stored?.replace(/^"|"$/g, "");
  return name && isZone(name) ? name : Intl.DateTimeFormat().resolvedOptions().timeZone;
}

/** @param {string} name */
function isZone(name) {
  try {
    formatOf(name);
    return true;
  } catch {
    return false;
  }
}

/** @param {string} zone */
function formatOf(zone) {
  let format = formats.get(zone);
  if (!format) {
    format = new Intl.DateTimeFormat("en-CA", {
      timeZone: zone,
      year: "numeric",
      month: "2-digit",
      day: "2-digit",
      hour: "2-digit",
      minute: "2-digit",
      second: "2-digit",
      hourCycle: "h23",
      timeZoneName: "short",
    });
    formats.set(zone, format);
  }
  return format;
}

/** @param {string | number | Date} time @param {string} zone */
function partsOf(time, zone) {
  return Object.fromEntries(formatOf(zone).formatToParts(new Date(time)).map(({ type, value }) => [type, value]));
}

/** @returns {string} "2026-03-01 14:05:09" */
export function inZone(time, zone = airflowZone()) {
  const { year, month, day, hour, minute, second } = partsOf(time, zone);
  return `${year}-${month}-${day} ${hour}:${minute}:${second}`;
}

/** @returns {string} the zone's short name at that time, such as "GMT+1" */
export const zoneName = (time, zone = airflowZone()) => partsOf(time, zone).timeZoneName;

/**
 * @param {string | null} text a local time, as a field of a form gives it: "2026-03-01T14:05"
 * @param {string} [zone]
 * @returns {string} the same moment in UTC; empty where there is none
 */
export function toUtc(text, zone = airflowZone()) {
  if (!text) return "";
  const asIfUtc = Date.parse(`${text}Z`);
  if (Number.isNaN(asIfUtc)) return "";
  // The offset at the guess may differ from the one at the result, beside a change of the clocks.
  let moment = asIfUtc;
  for (let round = 0; round < 2; round += 1) {
    const shown = Date.parse(`${inZone(moment, zone).replace(" ", "T")}Z`);
    moment += asIfUtc - shown;
  }
  return new Date(moment).toISOString();
}

/** @param {string | null} text @returns {string | null} a moment of an address, if it is one */
export const momentOf = (text) => (text && !Number.isNaN(Date.parse(text)) ? text : null);

/** @returns {string} a moment as a field of a form takes it; empty where there is none */
export const toField = (time, zone = airflowZone()) => (time ? inZone(time, zone).replace(" ", "T").slice(0, 16) : "");
