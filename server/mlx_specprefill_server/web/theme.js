// Before the first paint, so that nothing flashes: a classic script in the head.
"use strict";
document.documentElement.dataset.theme = localStorage.getItem("theme") || "auto";
