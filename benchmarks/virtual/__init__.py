"""One H200 as eight devices: Spindle's plans beside what a user would do today (`run`, then `report`)."""
