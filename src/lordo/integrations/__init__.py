"""LoRDO inside other libraries' trainers. Each module needs its library; nothing else in lordo imports them."""
