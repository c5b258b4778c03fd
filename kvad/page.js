"use strict";
// Every text of the run reaches the page by textContent: nothing of it is ever read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, text, kind) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
