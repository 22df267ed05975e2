from lipcert.model import Model
