"""The trainer: one TOML file is one run. Needs the extra `train`; nothing below this folder imports it."""
