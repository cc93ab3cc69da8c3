/**
 * Builds the page's assets: `node build.mjs` writes them into the package, `node build.mjs --check` compares them with a
 * new build. Names carry a hash of the content, so that browsers keep them for good.
 */

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const shipped = fileURLToPath(new URL("../airflow_provider_jetstream/plugins/monitor/static/", import.meta.url));
const LIBRARIES = ["preact", "htm", "uplot"];
/** Files of the package that no build writes. */
const BY_HAND = new Set(["icon.svg", "icon_dark.svg"]);

/** @param {string} text */
const digest = (text) => createHash("sha256").update(text).digest("hex").slice(0, 12);

/**
 * @param {string} entry
 * @param {Record<string, string>} [define]
 */
async function bundle(entry, define) {
  const { outputFiles } = await build({
    absWorkingDir: here,
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    charset: "utf8",
    format: "esm",
    // The oldest browsers that Airflow's own page supports have these.
    target: ["chrome123", "firefox120", "safari17.5"],
    legalComments: "none",
    define,
  });
  return outputFiles[0].text;
}

/** @returns {Promise<Record<string, string>>} the content of each file */
async function assets() {
  const style = await bundle("css/page.css");
  const styleName = `page-${digest(style)}.css`;
  const script = await bundle("src/main.js", { STYLE_NAME: JSON.stringify(styleName) });
  const scriptName = `page-${digest(script)}.js`;
  const airflow = await bundle("src/host/airflow_views.js", { SCRIPT_NAME: JSON.stringify(scriptName) });
  const airflowName = `airflow-${digest(airflow)}.js`;
  const page = readFileSync(join(here, "page.html"), "utf8")
    .replaceAll("page.js", scriptName)
    .replaceAll("page.css", styleName);
  const licences = LIBRARIES.map((name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    return `${name} ${version} (${license})\n\n${readFileSync(join(folder, "LICENSE"), "utf8").trim()}\n`;
  });
  return {
    [styleName]: style,
    [scriptName]: script,
    [airflowName]: airflow,
    "index.html": page,
    "assets.json": `${JSON.stringify({ script: scriptName, style: styleName, airflow: airflowName }, null, 2)}\n`,
    "libraries.LICENSE": licences.join(`\n${"-".repeat(80)}\n\n`),
  };
}

const built = await assets();
const present = readdirSync(shipped).filter((name) => !BY_HAND.has(name));
if (process.argv.includes("--check")) {
  const different = [...new Set([...present, ...Object.keys(built)])].filter(
    (name) => !present.includes(name) || readFileSync(join(shipped, name), "utf8") !== built[name],
  );
  if (different.length) {
    console.error(`expected what the source builds, found other content or other files: ${different.join(", ")}; run make web`);
    process.exit(1);
  }
  console.log(`the ${Object.keys(built).length} built files are those of the source`);
} else {
  for (const name of present) if (!(name in built)) rmSync(join(shipped, name), { recursive: true });
  for (const [name, content] of Object.entries(built)) writeFileSync(join(shipped, name), content);
  console.log(Object.entries(built).map(([name, content]) => `${name} ${content.length}`).join("\n"));
}
