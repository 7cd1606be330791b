"""The design that all pages share: looks, what they can do, and the parts they are made of."""
