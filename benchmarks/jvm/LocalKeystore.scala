package ags.tour

import java.io.File
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.Files
import java.util.Base64
import javax.crypto.{Cipher, Mac}
import javax.crypto.spec.{GCMParameterSpec, SecretKeySpec}

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import org.apache.hadoop.conf.Configuration
import org.apache.parquet.crypto.KeyAccessDeniedException
import org.apache.parquet.crypto.keytools.KmsClient

/** What parquet-java asks for keys: here the keystore in a file that ags_fast's local KMS keeps, which says in
  * ags_fast/keys/kms/local.py what is in it. It only unwraps; who has a cloud's KMS has such a class from there.
  */
class LocalKeystore extends KmsClient {
  private var storeId: String = _
  private var keys: JsonNode = _
  private var storeKey: Array[Byte] = _

  override def initialize(conf: Configuration, instanceId: String, instanceUrl: String, token: String): Unit = {
    val mapper = new ObjectMapper
    val outer = mapper.readTree(new File(conf.get("kms.local.path")))
    val mac = Mac.getInstance("HmacSHA256")
    mac.init(new SecretKeySpec(Files.readAllBytes(new File(conf.get("kms.local.key-file")).toPath), "HmacSHA256"))
    mac.update("ags-keystore\u0000".getBytes(UTF_8))
    storeKey = mac.doFinal(decode(outer.required("kdf").required("salt").textValue))
    storeId = outer.required("store_id").textValue
    val body = outer.required("body").textValue
    open(storeKey, decode(outer.required("seal").textValue), s"ags-keystore/body\u0000$storeId\u0000$body")
    keys = mapper.readTree(body).required("keys")
  }

  override def unwrapKey(wrapped: String, masterKeyId: String): Array[Byte] = {
    val blob = decode(wrapped) // 1, the version of the master key in 4 bytes, nonce, ciphertext, tag
    val number = BigInt(blob.slice(1, 5).reverse).toInt
    val master = keys.path(masterKeyId).path("versions").valueStream
      .filter(version => version.required("version").intValue == number && version.path("state").textValue == "enabled")
      .findFirst
      .orElseThrow(() => new KeyAccessDeniedException(s"no enabled version $number of the key $masterKeyId"))
    val aad = s"ags-keystore/key\u0000$storeId\u0000$number\u0000$masterKeyId"
    open(open(storeKey, decode(master.required("sealed").textValue), aad), blob.drop(5), masterKeyId)
  }

  override def wrapKey(key: Array[Byte], masterKeyId: String): String = throw new UnsupportedOperationException

  private def decode(text: String): Array[Byte] = Base64.getDecoder.decode(text)

  private def open(key: Array[Byte], sealedBytes: Array[Byte], aad: String): Array[Byte] = {
    val cipher = Cipher.getInstance("AES/GCM/NoPadding")
    cipher.init(Cipher.DECRYPT_MODE, new SecretKeySpec(key, "AES"), new GCMParameterSpec(128, sealedBytes, 0, 12))
    cipher.updateAAD(aad.getBytes(UTF_8))
    cipher.doFinal(sealedBytes, 12, sealedBytes.length - 12)
  }
}
