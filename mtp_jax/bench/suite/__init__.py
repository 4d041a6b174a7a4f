"""The end-to-end suite: whole engines against what the chip allows and against what else could be used."""
