package azurekeyvault

import wrapping "github.com/hashicorp/go-kms-wrapping/v2"

type Wrapper struct{ wrapping.Wrapper }

func NewWrapper() *Wrapper { panic("stub") }
