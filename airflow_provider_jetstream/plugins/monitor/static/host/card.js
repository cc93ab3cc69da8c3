/** The card on Airflow's dashboard: a frame around the page's card view, since Airflow's own components change. */

const NAME = "JetStream card";
const ADDRESS = new URL("../../#/card", import.meta.url).href;

globalThis[NAME] = () =>
  globalThis.React.createElement("iframe", {
    src: ADDRESS,
    title: "JetStream",
    // After Airflow's own first numbers. The page inside the frame sets the height.
    style: { order: 3, flex: "none", width: "100%", height: "124px", border: 0 },
  });
