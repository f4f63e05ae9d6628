"""Model configurations, as SGLang reads them to size its pools."""
