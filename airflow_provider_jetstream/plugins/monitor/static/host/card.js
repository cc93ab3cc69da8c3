/** The card on Airflow's dashboard, loaded by Airflow: a frame with the page in small, since Airflow's own parts change. */

const NAME = "JetStream card";
const ADDRESS = new URL("../../#/card", import.meta.url).href;

globalThis[NAME] = () =>
  globalThis.React.createElement("iframe", {
    src: ADDRESS,
    title: "JetStream",
    // Behind Airflow's own first numbers, which have this place too. The page in it sets the height to what it needs.
    style: { order: 3, flex: "none", width: "100%", height: "124px", border: 0 },
  });
