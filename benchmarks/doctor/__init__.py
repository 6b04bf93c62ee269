"""Does `fxprec.doctor` name the guilty tensor, and is its ranking that of real ablations?"""
