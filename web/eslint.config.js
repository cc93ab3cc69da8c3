import js from "@eslint/js";
import globals from "globals";

export default [
  { ignores: ["node_modules/"] },
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2024, globals: { ...globals.browser, STYLE_NAME: "readonly", SCRIPT_NAME: "readonly" } },
    rules: {
      eqeqeq: ["error", "always", { null: "ignore" }],
      "no-unused-vars": ["error", { args: "after-used", argsIgnorePattern: "^_" }],
      "no-eval": "error",
      "no-var": "error",
      "prefer-const": "error",
      "max-lines": ["error", 300],
    },
  },
  { files: ["build.mjs", "test/*.js", "*.config.js"], languageOptions: { globals: globals.node } },
];
