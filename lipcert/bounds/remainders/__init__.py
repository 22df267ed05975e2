"""More remainder rules, by kind of operation. Importing a module here fills the table of lipcert.bounds._remainder."""

from lipcert.bounds.remainders import curved, kinks, products, radial, recurrent

__all__ = ["curved", "kinks", "products", "radial", "recurrent"]
