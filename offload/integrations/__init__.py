"""Thin bridges to training libraries; each is imported only when it is used."""
