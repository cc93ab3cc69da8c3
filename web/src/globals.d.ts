/** The hashed names that the build puts in. */
declare const STYLE_NAME: string;
declare const SCRIPT_NAME: string;
/** React, as Airflow's own page provides it. */
declare var React: any;
