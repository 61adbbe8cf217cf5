// Walks through the page as somebody would, and prints what was seen as JSON. See test_page_in_browser.py.
// usage: node walk.mjs SPECIFICATION.json, which has url, token, chromium, file, question and a folder for pictures
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";

const given = JSON.parse(await readFile(process.argv[2], "utf8"));
const require = createRequire(given.modules + "/");
const { chromium } = require("playwright-core");
const browser = await chromium.launch({ executablePath: given.chromium, args: ["--no-sandbox"] });
const seen = { console: [], outside: [] };

async function open(options) {
  const page = await (await browser.newContext(options)).newPage();
  page.on("console", (message) => message.type() === "error" && seen.console.push(message.text()));
  page.on("pageerror", (error) => seen.console.push(String(error)));
  page.on("request", (request) => request.url().startsWith(given.url) || request.url().startsWith("data:") || seen.outside.push(request.url()));
  page.setDefaultTimeout(60_000);
  return page;
}

async function picture(page, name) {
  if (given.pictures) await page.screenshot({ path: `${given.pictures}/${name}.png`, fullPage: true });
}

async function enter(page) {
  await page.goto(given.url);
  await page.getByLabel("Token", { exact: true }).fill(given.token);
  await page.getByRole("button", { name: "Enter" }).click();
  await page.getByRole("table").waitFor();
}

const page = await open({ viewport: { width: 1280, height: 900 }, colorScheme: "light" });
const begun = Date.now();
await page.goto(given.url);
await page.getByLabel("Token", { exact: true }).waitFor();
seen.interactive_ms = Date.now() - begun;
await page.getByLabel("Token", { exact: true }).fill("wrong");
await page.keyboard.press("Enter");
seen.wrong_token = await page.getByRole("alert").textContent();
await enter(page);
await page.context().setOffline(true);
seen.gone = await page.getByRole("alert").filter({ hasText: "does not answer" }).textContent();
await page.context().setOffline(false);
await page.getByRole("alert").waitFor({ state: "hidden" });
await page.route("**/v1/status", (route) => route.fulfill({ status: 401, json: { error: { message: "a valid token is needed" } } }), { times: 1 });
await page.getByLabel("Token", { exact: true }).waitFor();
await enter(page);

await page.getByLabel("Text file").setInputFiles(given.file);
await page.getByLabel("Name", { exact: true }).fill("uploaded");
await page.getByRole("button", { name: "Upload" }).click();
const progress = page.getByRole("progressbar", { name: "How much of uploaded has been read" });
seen.progress = await progress.waitFor().then(() => true, () => false);
const row = page.getByRole("button", { name: "Chat on uploaded" });
await row.waitFor({ timeout: 240_000 });
await row.focus();
await page.keyboard.press("Enter");
await page.getByLabel("Question").fill(given.question);
await page.getByLabel("Most tokens").fill(String(given.tokens));
await page.getByLabel("Question").press("Enter");
await page.getByRole("button", { name: "Where it looked" }).waitFor({ timeout: 120_000 });
seen.answer = await page.locator(".turn.answer div").first().textContent();
seen.why = await page.locator(".turn.answer small").first().textContent();
await page.getByRole("button", { name: "Where it looked" }).click();
await page.locator("#text mark").first().waitFor();
seen.places = await page.getByRole("list", { name: "Places with most attention" }).getByRole("button").allTextContents();
await page.getByLabel("Token of the answer").focus();
await page.keyboard.press("ArrowRight");
seen.word = await page.locator("#word-now").textContent();
await page.getByLabel("Layers").selectOption({ index: 1 });
await page.getByRole("list", { name: "Places with most attention" }).getByRole("button").first().click();
seen.here = await page.locator("#text .here").textContent();
await page.getByLabel("Layers").selectOption({ index: 0 });
await page.getByLabel("Token of the answer").fill("-1");
await page.locator("#strip").click({ position: { x: 5, y: 5 } });
await picture(page, "page-light");
seen.words = [];
for (let at = 0; at < given.tokens; at += 1) {
  await page.getByLabel("Token of the answer").fill(String(at));
  const places = page.getByRole("list", { name: "Places with most attention" }).getByRole("button");
  seen.words.push([await page.locator("#word-now").textContent(), (await places.allTextContents()).slice(0, 2)]);
}

await page.getByRole("button", { name: "Continue" }).click();
await page.locator(".turn.answer").nth(1).locator("small").filter({ hasText: "tokens" }).waitFor({ timeout: 120_000 });
await page.getByLabel("Most tokens").fill("4000");
await page.getByLabel("Question").fill(given.question);
await page.getByRole("button", { name: "Ask", exact: true }).click();
await page.locator(".turn.answer").nth(2).locator("div").filter({ hasText: /./ }).waitFor({ timeout: 120_000 });
const stop = page.getByRole("button", { name: "Stop" });
if (await stop.isEnabled()) await stop.click();
await page.getByRole("button", { name: "Ask", exact: true }).and(page.locator(":enabled")).waitFor();
seen.stopped = await page.locator(".turn.answer").nth(2).locator("small").textContent();

if (given.axe) {
  const { readFileSync } = await import("node:fs");
  const source = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
  const found = await page.evaluate(`(async () => { ${source}; return axe.run(); })()`).catch((error) => ({ failed: String(error) }));
  seen.axe = found.violations?.map((each) => [each.impact, each.id, each.nodes.map((node) => node.html.slice(0, 120))]) ?? found;
}

for (const [name, options] of [["page-dark", { viewport: { width: 1280, height: 900 }, colorScheme: "dark" }], ["page-phone", { viewport: { width: 360, height: 740 }, colorScheme: "light" }], ["page-wide", { viewport: { width: 2560, height: 1200 } }]]) {
  const other = await open(options);
  await enter(other);
  await other.getByRole("button", { name: "Chat on uploaded" }).click();
  await other.getByLabel("Question").fill(given.question);
  await other.getByLabel("Most tokens").fill(String(given.tokens));
  await other.getByRole("button", { name: "Ask", exact: true }).click();
  await other.getByRole("button", { name: "Where it looked" }).click({ timeout: 120_000 });
  await other.locator("#text mark").first().waitFor();
  seen[name] = await other.evaluate("document.documentElement.scrollWidth <= innerWidth");
  if (name !== "page-wide") await picture(other, name);
  await other.close();
}

await page.getByRole("button", { name: "Delete uploaded" }).click();
await page.getByRole("button", { name: "Keep it" }).click();
seen.kept = await row.count();
await page.getByRole("button", { name: "Delete uploaded" }).click();
seen.asked = await page.locator("#sure-text").textContent();
await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
await row.waitFor({ state: "detached" });
await page.getByRole("button", { name: "Forget the token" }).click();
await page.getByLabel("Token", { exact: true }).waitFor();
const provoked = /\b401\b|ERR_INTERNET_DISCONNECTED/; // browsers say so themselves
seen.console = seen.console.filter((line) => !provoked.test(line));
console.log(JSON.stringify(seen));
await browser.close();
